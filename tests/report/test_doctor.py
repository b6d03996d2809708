"""Every known failure is recognised by what was really printed (tests/report/samples), and what is not known is said
to be unknown."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.cli.main import main
from launch.exit_codes import ExitCode
from launch.health.ledger import Ledger
from launch.report.diagnose import doctor
from launch.report.diagnose.doctor import diagnose, exit_meaning, slurm_line
from launch.report.diagnose.doctor_text import doctor_text
from launch.report.diagnose.known import BY_CODE, SYMPTOMS
from launch.run.attempt_log import append, read_history, record_of
from launch.run.attempts import Attempt
from launch.run.find import Found, find_run
from launch.run.outcome import Outcome
from launch.slurm.records import job_records
from tests.report.attempts import NOW, Made, stamp
from tools.doctor_page import page

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parent / "samples"
OUTCOMES = {
    "silent-death": ("crash", "trainer-1 (pid 4711, node n2) died without an error of its own: killed, or out of "
                              "memory"),
    "hang": ("hang", "no progress for 60 s in step 3, phase train\nnever arrived: trainer-1 (running, "
                     "runtime/faults.py:33 in strike)"),
    "node-fail": ("died", "the job ended without an outcome: n2 fell silent first"),
    "gpu-fault": ("hardware_fault", "n2: gpu.ecc: 4 uncorrected errors"),
    "preflight": ("preflight", "2 of 4 nodes are fit, the plan needs 4"),
    "user-error": ("user_error", "data.train has no column answer"),
    "disk-full": ("user_error", "no space left to write /scratch/runs: free some, or set run.dir to another disk"),
    "tokenizer": ("user_error", "models/policy holds no tokenizer (no tokenizer.json)"),
    "model-files": ("user_error", "2 of 2 weight files are missing in models/policy, the first is model-00001"),
    "port-in-use": ("user_error", "port 21000 (Ray GCS) is already taken by pid 7: python"),
    "crash": ("crash", "trainer-1 failed first: ValueError: a packed row of 9000 tokens"),
    "no-plan": ("user_error", "the allocation differs from the plan: 3 nodes, not 4"),
    "interrupted": ("interrupted", "interrupted twice: ended without a checkpoint"),
    "slurm-refused": ("user_error", "srun ended with status 1 before the supervisors started: srun: error: Unable to "
                                    "create step for job 7: Invalid generic resource (gres) specification"),
}
"""Row -> (status, message) as the launcher writes them."""


def sample(code: str) -> str:
    """What was printed; the first line says where it is from."""
    return (SAMPLES / f"{code}.txt").read_text(encoding="utf-8").partition("\n")[2]


def of_job(code: str):
    """The record that Slurm printed."""
    return job_records((SAMPLES / "slurm" / f"{code}.txt").read_text(encoding="utf-8").partition("\n")[2])[0]


def of(made: Made, **more):
    return diagnose(find_run(str(made.run)), **more)


@pytest.mark.parametrize("symptom", [each for each in SYMPTOMS if each.logs], ids=lambda each: each.code)
def test_logs(symptom, tmp_path):
    """Every line of the sample is recognised, in a log among harmless lines, and nothing comes before this row."""
    text = sample(symptom.code)
    assert symptom.see in text
    made = Made(tmp_path, "grpo").log("driver", f"{stamp(NOW)} driver INFO weight sync: 4 edges\n", "n1")
    made.log("trainer-0", f"{stamp(NOW)} trainer-0 INFO step 37\n{text}", "n1")
    made.ended("crash", 36, "trainer-0 failed first")
    found = of(made)
    assert found.known == (symptom.weight < 2) and found.causes[0].code == symptom.code
    assert found.causes[0].times == len(text.strip().splitlines())
    shown = doctor_text(found)
    assert symptom.code in shown and symptom.remedy[:40] in " ".join(shown.split()) and "trainer-0.log:2" in shown


@pytest.mark.parametrize("code", sorted(path.stem for path in (SAMPLES / "slurm").glob("*.txt")))
def test_slurm_records(code):
    record = of_job(code)
    found = diagnose(Found(record.job_id, None, None, record.job_id), record)
    assert found.causes[0].code == code and found.slurm == slurm_line(record)


@pytest.mark.parametrize("code", OUTCOMES)
def test_outcomes(code, tmp_path):
    status, message = OUTCOMES[code]
    made = Made(tmp_path, "grpo").on_nodes(["n1", "n2"]).ended(status, 3, message)
    assert of(made).causes[0].code == code


def test_no_further_attempt(tmp_path):
    made = Made(tmp_path, "grpo").on_nodes(["n1"]).ended("crash", 3, "trainer-0 failed first: ValueError: 9")
    past = record_of(Attempt(made.folder), "4711", Outcome(status="crash", step=3), read_history(made.run))
    why = "2 attempts in a row failed without completing a new step"
    append(made.run, past.model_copy(update={"decision": "stop", "why": why}))
    found = of(made)
    assert found.causes[0].code == "no-progress" and "2 attempts in a row" in found.causes[0].evidence
    why = "a crash after new steps; but the run has had its 20 attempts (run.max_attempts)"
    append(made.run, past.model_copy(update={"decision": "stop", "why": why}))
    assert "attempts-used-up" in {each.code for each in of(made).findings}


def test_every_row_has_a_sample():
    recorded = {path.stem for path in [*SAMPLES.glob("*.txt"), *(SAMPLES / "slurm").glob("*.txt")]}
    from_ledger = {"bad-node"}
    assert {each.code for each in SYMPTOMS} == recorded | set(OUTCOMES) | from_ledger | {"attempts-used-up"}


def test_remedies_name_keys_that_exist():
    from launch.config.schema import RunConfig
    for symptom in SYMPTOMS:
        for section, key in re.findall(r"\b([a-z_]+)\.([a-z_]+)\b(?!\.)", symptom.remedy):
            if section in RunConfig.model_fields and key not in ("yaml", "json", "jsonl"):
                keys = RunConfig.model_fields[section].annotation.model_fields
                assert key in keys, f"{symptom.code}: {section}.{key}"


def test_causes_come_before_what_follows(tmp_path):
    """256 ranks time out; one ran out of memory before."""
    made = Made(tmp_path, "grpo").log("trainer-7", sample("gpu-memory"))
    for rank in range(7):
        made.log(f"trainer-{rank}", sample("collective-timeout") + sample("peer-gone"))
    made.ended("crash", 36, "trainer-7 failed first")
    found = of(made)
    assert [each.code for each in found.causes] == ["gpu-memory"]
    text = doctor_text(found)
    assert "also seen    collective-timeout, peer-gone" in text or "also seen    peer-gone" in text


def test_a_bad_node_of_the_ledger(tmp_path):
    reason = "gpu.ecc: 4 uncorrected errors"
    made = Made(tmp_path, "grpo").on_nodes(["n1", "n2"]).ended("hardware_fault", 3, f"n2: {reason}")
    ledger = Ledger(made.run / "ledger.json")
    ledger.add("n2", reason, made.folder / "nodes/n2/preflight.json", "4711", now=time.time())
    ledger.add("n9", "gpu.ecc: 1 uncorrected error", "elsewhere", "4000", now=time.time())
    found = {each.code: each for each in of(made).findings}
    assert found["bad-node"].evidence == "n2: gpu.ecc: 4 uncorrected errors" and "gpu-fault" in found


def test_unknown_is_said_and_shows_the_first_error_and_where_to_look(tmp_path):
    trace = "Traceback (most recent call last):\n  File \"x.py\", line 1, in f\nMyOwnError: quux\n"
    made = Made(tmp_path, "grpo").log("reward-0", trace)
    made.ended("crash", 3, "reward-0 failed first: MyOwnError: quux")
    found = of(made)
    text = doctor_text(found)
    assert not found.known and "unknown" in text and "first error  reward-0: MyOwnError: quux" in text
    assert "megatron-rl logs grpo --first-error" in text


def test_nothing_is_wrong(tmp_path):
    assert "no problem found" in doctor_text(of(Made(tmp_path, "grpo").ended("finished", 500)))
    record = job_records("JobId=7 JobName=x JobState=RUNNING Reason=None ExitCode=0:0 NumNodes=1")[0]
    assert "no problem found" in doctor_text(diagnose(Found("7", None, None, "7"), record))


@pytest.mark.parametrize("line, meaning", [
    ("FAILED NonZeroExitCode exit=70:0 restarts=0", "a component of the job died"),
    ("FAILED NonZeroExitCode exit=93:0 restarts=2", "crashed again without progress: do not restart"),
    ("FAILED RaisedSignal:9(Killed) exit=0:9 restarts=0", "ended by signal 9"),
    ("FAILED RaisedSignal:53 exit=0:53 restarts=0", ""), ("RUNNING None exit=0:0 restarts=0", "")])
def test_exit_codes(line, meaning):
    assert exit_meaning(line) == meaning


def test_every_exit_code_has_a_row():
    """Also where Slurm's record is all that is left of a job."""
    for code in set(ExitCode) - {ExitCode.OK}:
        line = f"FAILED NonZeroExitCode exit={code:d}:0 restarts=0"
        assert any(each.slurm and re.search(each.slurm, line) for each in SYMPTOMS), code.name


def test_json(tmp_path, capsys):
    made = Made(tmp_path, "grpo").log("trainer-0", sample("gpu-memory")).ended("crash", 3, "trainer-0 failed first")
    assert main(["doctor", str(made.run), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["schema_version"] == 1 and values["known"] and values["findings"][0]["code"] == "gpu-memory"
    assert values["findings"][0]["page"] == "docs/troubleshooting.md#gpu-memory"


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda each: each.code)
def test_lines_fit(symptom, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)         # a path is not broken into lines
    made = Made(Path("runs"), "grpo").ended("crash", 3, "word " * 60)
    found = of(made)
    shown = doctor_text(replace(found, findings=(doctor._finding(symptom, "e " * 200, "x.log:3"),)))
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_the_page_is_written_from_the_table():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert page(text) == text, "python -m tools.doctor_page"
    anchors = re.findall(r'<a id="([^"]+)">', text)
    assert anchors == [each.code for each in SYMPTOMS] and len(set(anchors)) == len(BY_CODE)


def test_an_unknown_run_and_an_unknown_job(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))               # no Slurm here
    (tmp_path / "grpo" / "attempts" / "1").mkdir(parents=True)
    assert main(["doctor", "grpp", "--dir", str(tmp_path)]) == 2
    assert "did you mean grpo?" in capsys.readouterr().err
    assert main(["doctor", "4711", "--dir", str(tmp_path)]) == 6
    assert "no run here belongs to job 4711" in capsys.readouterr().err
