"""`status`, `doctor` and `stop` of jobs that have written nothing: only Slurm knows them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.slurm_cluster import REPOSITORY, SlurmCluster


def ask(slurm: SlurmCluster, verb: str, subject: object, folder: Path) -> tuple[int, str]:
    done = slurm.run(sys.executable, "-m", "launch", verb, str(subject), "--dir", str(folder), check=False,
                     variables={"PYTHONPATH": str(REPOSITORY)})
    return done.returncode, done.stdout + done.stderr


def test_a_job_whose_output_folder_is_missing(slurm, tmp_path):
    job = slurm.submit("--job-name=grpo", f"--output={tmp_path}/missing/%j.log", "--wrap", "true")
    slurm.wait_for(job, "FAILED")
    code, text = ask(slurm, "status", job, tmp_path)
    assert code == 0 and text.startswith("grpo         QUEUED > ENDED FAILED")
    code, text = ask(slurm, "doctor", job, tmp_path)
    assert code == 0 and "output-folder: Slurm could not open" in text and "exit=0:53" in text
    code, text = ask(slurm, "stop", job, tmp_path)
    assert code == 2 and f"job {job} has already ended: FAILED" in text


def test_a_job_that_waits_is_found_by_its_name_and_stop_takes_it_out_of_the_queue(slurm, tmp_path):
    job = slurm.submit("--job-name=grpo", "--hold", f"--output={tmp_path}/%j.log", "--wrap", "true")
    code, text = ask(slurm, "status", "grpo", tmp_path)
    assert code == 0 and text.startswith("grpo         QUEUED\n") and "JobHeldUser" in text
    assert "held: The job is held" in ask(slurm, "doctor", "grpo", tmp_path)[1]
    code, text = ask(slurm, "stop", "grpo", tmp_path)
    assert code == 0 and f"cancelled job {job}" in text
    slurm.wait_for(job, "CANCELLED")


def test_a_job_that_nobody_knows(slurm, tmp_path):
    code, text = ask(slurm, "doctor", 999999, tmp_path)
    assert code == 6 and "no run here belongs to job 999999" in text and "Invalid job id" in text
