"""Several jobs of one shipped script wait for each other by its name (`--dependency=singleton`): which of them have
nothing left to do, and which belong to other runs, is told apart."""

from __future__ import annotations

import pytest

from launch.run.attempt_log import read_history
from tests.launcher_stub import VARIABLES
from tests.slurm.rehearsing import SCRIPT_7B

WORDS = ("algorithm.max_staleness=0", "run.steps=3", "trainer.optimizer.warmup_steps=0")


@pytest.fixture(scope="module")
def chain(slurm, tmp_path_factory):
    """A rehearsal, the run, the run again, another run: job ids, when all have ended; and the folder of the runs."""
    folder = tmp_path_factory.mktemp("chain")

    def submit(*words: str):
        return slurm.submit("--time=20", f"--output={folder}/%x-%j.log", SCRIPT_7B, f"run.dir={folder}", *WORDS, *words,
                            variables=VARIABLES)

    jobs = {"rehearsal": submit("run.name=a", "run.rehearse=true"), "a": submit("run.name=a"),
            "again": submit("run.name=a"), "b": submit("run.name=b")}
    slurm.wait_until(lambda: not set(jobs.values()) & set(slurm.jobs()), "all four jobs to end", 180)
    return jobs, folder


@pytest.mark.parametrize("job", ["rehearsal", "a", "b"])
def test_the_run_follows_its_rehearsal_and_another_run_of_the_script_is_not_touched(slurm, chain, job):
    jobs, folder = chain
    assert slurm.job(jobs[job])["JobState"] == "COMPLETED", slurm.output(jobs[job])
    assert [past.status for past in read_history(folder / "b")] == ["finished"]
    assert [past.job_id for past in read_history(folder / "a")] == [str(jobs["rehearsal"]), str(jobs["a"])]


def test_a_job_of_the_chain_that_has_nothing_left_to_do_is_cancelled(slurm, chain):
    jobs, _ = chain
    assert slurm.job(jobs["again"])["JobState"] == "CANCELLED"
    assert f"cancelled job {jobs['again']}, which was waiting to continue this run" in slurm.output(jobs["a"])
