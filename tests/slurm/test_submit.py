"""Submission on a real Slurm: what arrives, what is refused and how. Jobs are held: nothing of theirs runs here."""

from __future__ import annotations

import random
import re
import stat
import sys
from pathlib import Path

import pytest

from launch.cli.main import main
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.slurm.client import Slurm
from launch.slurm.render import plan_hash_of
from launch.slurm.submit import seconds
from tests.slurm.test_client import without_controller
from tests.slurm_cluster import REPOSITORY, SlurmCluster

CONFIG = "configs/7b/grpo.yaml"
LISTENER = '''\
import os, signal, sys
print(os.getcwd(), *sys.argv[1:], flush=True)
print("got", signal.sigwait([signal.SIGUSR1]).name, "in a step" if "SLURM_STEP_NODELIST" in os.environ else "alone")
'''
"""Stands in for the launcher at the end of a batch script."""


@pytest.fixture
def held(tmp_path) -> Path:
    """A site profile with which a job waits for ever."""
    profile = tmp_path / "held.yaml"
    profile.write_text("sbatch: [--hold]\n")
    return profile


def launch(slurm: SlurmCluster, *words: object, **variables: str):
    return slurm.run(sys.executable, "-m", "launch", "launch", CONFIG, "--on", "slurm", "run.rehearse=true",
                     *map(str, words), check=False, variables=variables)


def test_a_dry_run_prints_a_script_that_can_be_submitted(slurm: SlurmCluster, tmp_path):
    done = launch(slurm, "--dry-run", f"run.dir={tmp_path / 'runs'}", "--time", "1-0", "--spares", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n") and "#SBATCH --time=1-0\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f'run.dir={tmp_path / "runs"} placement.spare_nodes=0 "$@"')
    assert "stop margin: " in done.stderr and "plan " in done.stderr and not slurm.jobs()
    script = tmp_path / "mine.sbatch"
    script.write_text(done.stdout)
    job = slurm.job(slurm.submit("--hold", str(script), cwd=tmp_path))
    assert Path(job["StdOut"]).parent.is_dir() and job["TimeLimit"] == "1-00:00:00"


def test_the_job_is_what_was_printed(slurm: SlurmCluster, held, tmp_path):
    """The id alone on stdout; the plan's hash in the comment; a variable that would change the job has no effect."""
    runs = tmp_path / "runs"
    done = launch(slurm, f"run.dir={runs}", "--profile", held, "--time", "02:00:00", "--exclude", "h100-[001-002]",
                  SBATCH_TIMELIMIT="33", SLURM_JOB_ID="77")
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.removesuffix("\n")
    assert job_id.isdecimal()
    job = Slurm(slurm.environment).show_job(job_id)
    assert (job.time_limit, job.node_count, job.name) == ("02:00:00", 2, "grpo-7b") and job.requeue
    assert job.excluded == ("h100-001", "h100-002")
    assert f"({plan_hash_of(job.comment)})" in done.stderr.splitlines()[0]          # of the plan that was printed
    assert re.search(r"removed from the submission's environment: .*SBATCH_TIMELIMIT, SLURM_JOB_ID", done.stderr)
    assert "Slurm expects it to start at" in done.stderr or "Slurm says" in done.stderr
    script, log = Path(job.command), Path(job.stdout)
    assert stat.S_IMODE(script.stat().st_mode) == 0o700 and script.parent == log.parent == runs / "grpo-7b/slurm"
    assert log.name == f"{job_id}.log" and job.fields["TresPerNode"].endswith("gpu:8")


@pytest.mark.parametrize("words, what, fix", [
    (["--partition", "nope"], "partition", "sinfo -s"),
    (["--exclude", "h100-[001-031]"], "node configuration is not available", "fewer nodes"),
    (["--reservation", "nope"], "reservation is invalid", "scontrol show reservation")])
def test_what_slurm_refuses(slurm: SlurmCluster, tmp_path, words, what, fix):
    done = launch(slurm, f"run.dir={tmp_path}", *words)
    assert done.returncode == ExitCode.SLURM and done.stdout == "" and "Traceback" not in done.stderr
    assert re.search(f"error: Slurm refused: .*{what}", done.stderr, re.IGNORECASE), done.stderr
    assert fix in done.stderr
    assert not slurm.jobs()


def test_an_option_that_this_slurm_does_not_have(slurm: SlurmCluster, tmp_path):
    profile = tmp_path / "site.yaml"
    profile.write_text("sbatch: [--frobnicate=2]\n")
    done = launch(slurm, f"run.dir={tmp_path}", "--profile", profile)
    assert done.returncode == ExitCode.SLURM and "this Slurm has no --frobnicate" in done.stderr, done.stderr


def test_without_a_controller(slurm: SlurmCluster, tmp_path):
    conf = without_controller(slurm, tmp_path)
    done = launch(slurm, f"run.dir={tmp_path}", SLURM_CONF=str(conf))
    assert done.returncode == ExitCode.SLURM and done.stdout == "" and "scontrol ping" in done.stderr, done.stderr


@pytest.mark.parametrize("words, what", [
    (["run.stop_margin_s=61"], "run.stop_margin_s = 61 is too short: a stop needs"),
    (["--time", "1"], "--time 1 is 60 s, but the job stops"), (["--time", "soon"], "is not a Slurm time"),
    (["cluster=local"], "not Slurm's nodes"), (["run.rehearse=false", "model.lora_rank=8"], "model.lora_rank = 8"),
    (["--profile", "nope.yaml"], "no site profile nope.yaml")])
def test_what_is_refused_before_slurm_is_asked(slurm: SlurmCluster, tmp_path, words, what):
    done = launch(slurm, f"run.dir={tmp_path / 'runs'}", *words)
    assert done.returncode == ExitCode.USER_ERROR and done.stdout == "" and what in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words, what", [
    (("--partition", "x"), "--partition applies to Slurm jobs only"),
    (("--dry-run",), "--dry-run applies to Slurm jobs only"),
    (("run.rehearse=true", "cluster=local"), "run.rehearse = true is only for Slurm jobs"),
    (("--on", "slurm", "--device", "cpu"), "--device applies to this machine only")])
def test_what_is_of_slurm_only_is_refused_elsewhere(capsys, words, what):
    assert main(["launch", CONFIG, *words]) == ExitCode.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and what in err


def test_a_shipped_script_as_a_user_submits_it(slurm: SlurmCluster, tmp_path):
    """From the root, with overrides and flags; the process that the script becomes gets the batch shell's signal."""
    package = tmp_path / "launch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
                                         + LISTENER)
    job_id = slurm.submit("--time=10", str(REPOSITORY / "slurm/grpo_7b.sbatch"), "run.steps=500", "trainer.tp=8",
                          cwd=tmp_path)
    slurm.wait_for(job_id, "RUNNING")
    log = tmp_path / f"grpo-7b-{job_id}.log"
    slurm.wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "the job's first line")
    Slurm(slurm.environment).cancel(str(job_id), signal="USR1", batch=True)
    slurm.wait_for(job_id, "COMPLETED")
    first, second = log.read_text().splitlines()
    assert first == f"{tmp_path} job {CONFIG} run.steps=500 trainer.tp=8"
    assert second == "got SIGUSR1 alone"


def test_a_shipped_script_submitted_from_elsewhere(slurm: SlurmCluster, tmp_path):
    job_id = slurm.submit(str(REPOSITORY / "slurm/grpo_7b.sbatch"), cwd=tmp_path)
    slurm.wait_for(job_id, "FAILED")
    assert Slurm(slurm.environment).show_job(str(job_id)).exit_code == ExitCode.USER_ERROR
    assert "submit from the root of the repository" in (tmp_path / f"grpo-7b-{job_id}.log").read_text()


@pytest.mark.parametrize("text, expected", [("90", 5400), ("90:30", 5430), ("12:00:00", 43200), ("2-0", 172800),
                                            ("1-12", 129600), ("1-0:30", 88200), ("1-0:0:05", 86405), ("1-", 86400),
                                            ("1:0:0", 3600), ("0", None), ("UNLIMITED", None), ("-1", None)])
def test_time_limits(text, expected):
    assert seconds(text) == expected


def test_time_limits_as_a_real_slurm_takes_them(slurm: SlurmCluster, tmp_path):
    """The same texts taken, with the same meaning: what Slurm prints is read back."""
    script = tmp_path / "x.sh"
    script.write_text("#!/bin/bash\n#SBATCH --hold\ntrue\n")
    draw = random.Random(35)
    numbers = ["0", "00", "1", "5", "07", "30", "61", "100", ""]
    texts = {"".join(draw.choice(numbers) + draw.choice([":", ":", "-", ""]) for _ in range(draw.randint(1, 4)))
             for _ in range(120)} - {""}
    taken = 0
    for text in sorted(texts | {"unlimited", "Infinite", "-1", "soon", "1h", "1.5", " 5", "+5", "\u0663", "1:00:00"}):
        done = slurm.run("sbatch", "--parsable", f"--time={text}", str(script), check=False, cwd=tmp_path)
        if done.returncode:
            with pytest.raises(UserError, match="is not a Slurm time"):
                seconds(text)
        else:
            ours, said = seconds(text), slurm.job(int(done.stdout))["TimeLimit"]
            assert (None if ours is None else -(-ours // 60) * 60) == seconds(said), f"{text!r}: {said}"
            taken += 1
    assert 20 < taken < len(texts)
