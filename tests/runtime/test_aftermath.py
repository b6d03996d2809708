"""What the leader does after an attempt, against a Slurm that answers as it is told: what a real one cannot be made to
say at a given moment. What it can is in tests/slurm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch.config.load import LoadedConfig, load_config
from launch.config.schema import Run
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.health.check import checks_to_json, critical, ok
from launch.health.ledger import Ledger
from launch.run.attempt_log import PastAttempt, append, read_history, record_of
from launch.run.attempts import Attempt, RunFolder
from launch.run.find import JOB_FILE
from launch.run.outcome import Outcome
from launch.run.stop import ask_to_stop
from launch.runtime import aftermath
from launch.runtime.aftermath import Aftermath
from launch.slurm.job_facts import combine
from launch.slurm.records import JobRecord, Queued, job_records
from launch.slurm.refusals import SlurmError
from tests.runtime.slurm_text import JOB

CONFIG = "configs/tiny/grpo.yaml"
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=4\n"
NO_SUCH_NODES = "Requested node configuration is not available"
REFUSED = SlurmError("Access/permission denied")


class FakeSlurm:
    """At the interface of `launch.slurm.client.Slurm`: answers from its attributes, and writes down what it is asked to
    do."""

    def __init__(self) -> None:
        self.record = job_records(JOB.format(end=0))[0]
        self.nodes = {f"n{number:03d}": True for number in range(1, 9)}
        self.others: dict[str, JobRecord] = {}
        self.refusals: dict[str, list[Exception]] = {}
        self.done: list[tuple[str, ...]] = []

    def patient(self, say) -> FakeSlurm:
        return self

    def show_job(self, job_id: str) -> JobRecord:
        self._refused("show_job")
        return self.others.get(job_id, self.record)

    def usable(self, partition: str, reservation: str = "") -> dict[str, bool]:
        return self.nodes

    def batch_script(self, job_id: str) -> str:
        return SCRIPT

    def submit_once(self, script: Path, words, options, *, name: str, cwd: Path | None) -> str:
        self.done.append(("submit", *options))
        self._refused("submit")
        return "8"

    def requeue(self, job_id: str) -> None:
        self.done.append(("requeue", job_id))
        self._refused("requeue")

    def queue(self, *, name: str) -> list[Queued]:
        return [Queued(job, "PENDING") for job in self.others]

    def cancel(self, job_id: str) -> None:
        self.done.append(("cancel", job_id))

    def _refused(self, what: str) -> None:
        if self.refusals.get(what) and (error := self.refusals[what].pop(0)) is not None:
            raise error

    @property
    def options(self) -> dict[str, str]:
        """Of the last submission."""
        return dict(word.removeprefix("--").partition("=")[::2] for word in self.done[-1][1:])


class Case:
    """An attempt of job 7 on n001 to n004, in a partition of eight."""

    def __init__(self, folder: Path) -> None:
        self.slurm, self.said = FakeSlurm(), []
        self.words = (f"run.dir={folder}", "run.name=r", "run.steps=10")
        with RunFolder(Run(name="r", dir=str(folder), steps=10)) as run:
            self.run_folder, self.attempt = run.folder, run.new_attempt()
        self.facts = combine(self.slurm.record)
        self.ledger = Ledger(self.run_folder / "ledger.json", cluster_nodes=4)
        self.write_job(self.attempt)

    def write_job(self, attempt: Attempt, **values) -> None:
        facts = self.facts.model_copy(update=values)
        (attempt.folder / JOB_FILE).write_text(facts.model_dump_json(), encoding="utf-8")

    def conclude(self, status: str = "finished", step: int = 5, *, before=(), words=(), code=None, **values) -> int:
        after = Aftermath(self.slurm, self.facts, self.attempt, self.ledger, self.loaded(*words), self.words, before,
                          self.said.append)
        outcome = after.with_evidence(Outcome(status=status, step=step, **values))
        past = record_of(self.attempt, self.facts.job_id, outcome, before)
        return after.conclude(past, code)

    def loaded(self, *words: str) -> LoadedConfig:
        return load_config(CONFIG, (*self.words, *words))

    @property
    def past(self) -> PastAttempt:
        return read_history(self.run_folder)[-1]

    def another(self, job_id: str, **values) -> None:
        """A job of the same name that waits: by the same command unless told otherwise."""
        self.slurm.others[job_id] = replace(self.slurm.record, job_id=job_id, state="PENDING", **values)


@pytest.fixture
def case(tmp_path, monkeypatch) -> Case:
    for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_SUBMIT_DIR", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    return Case(tmp_path)


# ---- jobs that wait --------------------------------------------------------------------------------------------------

def test_a_chain_of_the_same_command_is_cancelled_when_the_run_is_finished(case):
    case.another("9")
    assert case.conclude(step=10) == 0 and case.past.decision == "done"
    assert case.slurm.done == [("cancel", "9")]


@pytest.mark.parametrize("other", [
    {"command": "/home/alice/grpo.sbatch run.name=b"}, {"command": "/home/alice/grpo.sbatch run.rehearse=true"},
    {"work_dir": "/home/alice/other-checkout"}, {"command": "/home/alice/else.sh"}, {"job_id": "9_[1-3]"}])
def test_jobs_of_other_runs_that_share_the_name_are_left_alone(case, other):
    """`sbatch slurm/grpo_70b.sbatch run.name=a` and `run.name=b` have one job name, that of the script; the points of a
    sweep have one command too."""
    case.another(**{"job_id": "9", **other})
    case.conclude(step=10)
    assert case.slurm.done == []


def test_a_fresh_job_of_an_earlier_attempt_is_cancelled_too(case):
    append(case.run_folder, PastAttempt(attempt=2, job_id="6", status="crash", step_before=0, step=1, at=0,
                                        successor="9"))
    case.another("9", command="/runs/r/attempts/1/job.sbatch")
    case.conclude(step=10)
    assert case.slurm.done == [("cancel", "9")]


def test_nothing_is_cancelled_where_the_configuration_has_become_another_runs(case, tmp_path):
    """Edited after this job began: the job that waits will read it as it is then."""
    file = tmp_path / "mine.yaml"
    file.write_text(Path(CONFIG).read_text(encoding="utf-8"), encoding="utf-8")
    words = [word for word in case.words if not word.startswith("run.name")]
    loaded = load_config(file, words)
    file.write_text(file.read_text(encoding="utf-8").replace("name: ", "name: b-", 1), encoding="utf-8")
    case.another("9")
    after = Aftermath(case.slurm, case.facts, case.attempt, case.ledger, loaded, words, (), case.said.append)
    after.conclude(record_of(case.attempt, "7", Outcome(status="finished", step=10), ()), None)
    assert case.slurm.done == [] and "now names another run" in case.said[-1]


def test_a_rehearsal_cancels_nothing(case):
    case.another("9")
    case.conclude(words=("run.rehearse=true",))
    assert case.slurm.done == []


# ---- nodes left out --------------------------------------------------------------------------------------------------

def test_a_bad_node_is_left_out_and_what_the_user_excluded_stays_out(case):
    case.facts = case.facts.model_copy(update={"excluded": ("n008",)})
    assert case.conclude("node_failure", nodes=("n003",)) == 76
    assert case.slurm.options["exclude"] == "n008,n003" and case.slurm.options["nodes"] == "4"
    assert (case.past.decision, case.past.successor, case.past.excluded) == ("fresh", "8", ("n008", "n003"))


def test_what_an_earlier_job_left_out_is_not_left_out_for_ever(case):
    """The job's exclusions hold the automatic ones of the job before; only the ledger says which still count."""
    before = [PastAttempt(attempt=1, job_id="6", status="node_failure", step_before=0, step=1, at=0, successor="7")]
    case.write_job(case.attempt, job_id="6", excluded=("n008",))        # attempts/1: the job that the user submitted
    case.facts = case.facts.model_copy(update={"excluded": ("n008", "n005")})
    case.ledger.add("n005", "node failure: long ago", "beat", "6", now=0)
    case.conclude("node_failure", before=before, nodes=("n003",))
    assert case.slurm.options["exclude"] == "n008,n003"


@pytest.mark.parametrize(("partition", "failed", "most"), [(64, 20, 16), (64, 3, 3), (32, 20, 8),
                                                            (40, 6, 6), (40, 12, 8)])
def test_no_more_than_a_share_of_the_partition_is_left_out(case, partition, failed, most):
    names = tuple(f"n{number:03d}" for number in range(1, partition + 1))
    case.slurm.nodes = dict.fromkeys(names, True)
    case.facts = case.facts.model_copy(update={"nodes": names[:32]})
    case.conclude("node_failure", nodes=names[:failed])
    bad = [each for each in case.slurm.options.get("exclude", "").split(",") if each]
    assert len(bad) <= most and set(bad) <= set(names[:failed]) and (bad or failed > partition / 2)


def test_enough_nodes_remain(case):
    """Five nodes, four needed: of two bad ones the worse is left out, and the other told of."""
    case.slurm.nodes = dict.fromkeys(("n001", "n002", "n003", "n004", "n005"), True)
    case.ledger.max_share = 1.0
    case.ledger.add("n005", "gpu.ecc: 4", "preflight.json", "6")
    case.conclude("node_failure", nodes=("n003",))
    assert case.slurm.options["exclude"] in ("n003", "n005") and case.slurm.options["nodes"] == "4"
    assert any("fewer than 4 nodes would remain" in line for line in case.said)


def test_what_the_preflight_refused_is_left_out_of_the_next_job_also_where_the_ledger_does_not_know_it(case):
    """A node on which another job's processes run is nobody's fault."""
    assert case.conclude("preflight", nodes=("n003",)) == ExitCode.PREFLIGHT
    assert case.slurm.options["exclude"] == "n003" and not case.ledger.entries()


def test_where_no_further_node_is_there_the_run_goes_on_smaller(case):
    case.slurm.nodes = dict.fromkeys(("n001", "n002", "n003", "n004"), True)
    case.conclude("node_failure", nodes=("n003",), words=("run.min_nodes=2",))
    assert (case.slurm.options["nodes"], case.slurm.options["exclude"]) == ("3-4", "n003")


def test_a_job_that_went_on_smaller_asks_for_all_its_nodes_again(case):
    before = [PastAttempt(attempt=1, job_id="6", status="node_failure", step_before=0, step=1, at=0, successor="7")]
    case.facts = case.facts.model_copy(update={"nodes": ("n001", "n002", "n004")})
    case.conclude("node_failure", before=before, nodes=("n002",), words=("run.min_nodes=2",))
    assert case.slurm.options["nodes"] == "4"


def test_where_enough_nodes_are_there_it_does_not_start_smaller_only_because_they_are_busy(case):
    case.conclude("node_failure", nodes=("n003",), words=("run.min_nodes=2",))
    assert case.slurm.options["nodes"] == "4" and len(case.slurm.done) == 1


def test_the_whole_number_refused_fewer_are_asked_for(case):
    """A constraint, say, that sinfo's list of the partition does not show."""
    case.slurm.refusals["submit"] = [SlurmError(NO_SUCH_NODES)]
    case.conclude("node_failure", nodes=("n003",), words=("run.min_nodes=2",))
    assert case.slurm.options["nodes"] == "3-4" and case.past.successor == "8"


# ---- what cannot be done as decided ----------------------------------------------------------------------------------

def test_without_a_fresh_job_this_one_is_requeued(case):
    case.slurm.refusals["submit"] = [REFUSED]
    assert case.conclude("node_failure", nodes=("n003",)) == 0
    assert [each[0] for each in case.slurm.done] == ["submit", "requeue"]
    assert (case.past.decision, case.past.successor) == ("requeue", None)
    assert case.ledger.excluded() == ("n003",), "which the next attempt's preflight leaves out"


def test_without_a_requeue_a_fresh_job_goes_on_and_this_one_is_no_success(case):
    case.slurm.refusals["requeue"] = [REFUSED]
    ask_to_stop(case.attempt.folder, "time-limit")
    assert case.conclude("stopped") == ExitCode.UNFINISHED
    assert [each[0] for each in case.slurm.done] == ["requeue", "submit"]
    assert (case.past.decision, case.past.successor, case.past.exit_code) == ("fresh", "8", ExitCode.UNFINISHED)


def test_a_job_that_may_not_be_requeued_is_not(case):
    case.facts = case.facts.model_copy(update={"requeue": False})
    case.conclude("crash")
    assert [each[0] for each in case.slurm.done] == ["submit"]


def test_neither_way_is_said_and_is_no_success(case):
    case.slurm.refusals = {"requeue": [REFUSED], "submit": [REFUSED]}
    ask_to_stop(case.attempt.folder, "preemption")
    assert case.conclude("stopped") == ExitCode.UNFINISHED
    assert "neither requeued nor submitted" in case.past.why and "submit the job again" in case.said[-1]


def test_a_requeue_whose_answer_was_lost_is_not_doubled(case):
    case.slurm.refusals = {"requeue": [SlurmError("Socket timed out", answer="none")]}
    requeue = case.slurm.requeue

    def lost(job_id: str) -> None:
        case.slurm.record = replace(case.slurm.record, restarts=1)
        requeue(job_id)

    case.slurm.requeue = lost
    assert case.conclude("crash") == 0 and [each[0] for each in case.slurm.done] == ["requeue"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), UserError("not a host list")])
def test_whatever_goes_wrong_with_the_fresh_job_the_line_is_written_and_the_job_requeued(case, monkeypatch, error):
    def fails(*arguments, **named):
        raise error

    monkeypatch.setattr(aftermath, "write_atomically", fails)
    assert case.conclude("node_failure", nodes=("n003",)) == 0
    assert case.slurm.done == [("requeue", "7")] and case.past.status == "node_failure"


def test_a_line_that_cannot_be_written_does_not_keep_the_job_from_going_on(case, monkeypatch):
    def full(*arguments):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(aftermath, "append", full)
    assert case.conclude("crash") == 0 and case.slurm.done == [("requeue", "7")]
    assert any("attempts.jsonl could not be written" in line for line in case.said)


def test_an_unreadable_ledger_is_said(case):
    case.ledger.path.write_text("{", encoding="utf-8")
    assert case.conclude("node_failure", nodes=("n003",)) == 0
    assert any("n003 could not be added to the ledger" in line for line in case.said)
    assert case.slurm.done == [("requeue", "7")], "whom to leave out cannot be told"


def checked(case, found: dict[str, tuple[str, ...]], nodes: int = 4) -> None:
    """What every node's checks found after the failure: names of critical ones."""
    for number in range(1, nodes + 1):
        folder = case.attempt.folder / "nodes" / f"n{number:03d}"
        folder.mkdir(parents=True)
        checks = [critical(name, 1, "as a test has it", "replace it") for name in found.get(folder.name, ())]
        (folder / "aftermath.json").write_text(json.dumps(checks_to_json([ok("gpu.model", "H100", ""), *checks])))


@pytest.mark.parametrize("found, faulty", [
    ({"n002": ("gpu.lost",)}, ("n002",)), ({"n002": ("disk.scratch", "gpu.ecc")}, ("n002",)),
    ({"n002": ("disk.scratch", "model.files", "limit.nofile")}, ()),
    ({"n002": ("gpu.processes", "gpu.memory")}, ()),                # another's job, or what our own left behind
    ({f"n{number:03d}": ("gpu.nvlink",) for number in range(1, 5)}, ())])   # the site, or the check
def test_a_crash_is_the_hardwares_where_it_is_broken_afterwards(case, found, faulty):
    checked(case, found)
    case.conclude("crash")
    assert case.past.status == ("hardware_fault" if faulty else "crash") and case.past.nodes == faulty
    assert case.past.decision == ("fresh" if faulty else "requeue")
    assert tuple(case.ledger.excluded()) == faulty


def test_a_check_that_is_skipped_blames_nobody_after_a_crash_either(case):
    checked(case, {"n002": ("gpu.nvlink",)})
    config = case.loaded("run.skip_checks=[gpu.nvlink]").config
    (case.attempt.folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    case.conclude("crash")
    assert case.past.status == "crash" and not case.ledger.excluded()


def test_an_unreadable_check_after_the_failure_is_said(case):
    folder = case.attempt.folder / "nodes" / "n002"
    folder.mkdir(parents=True)
    (folder / "aftermath.json").write_text("[{", encoding="utf-8")
    assert case.conclude("crash") == 0 and any("n002: its checks" in line for line in case.said)
    assert case.past.status == "crash"


# ---- what Slurm knows better -----------------------------------------------------------------------------------------

def test_a_cancelled_job_does_not_come_back(case):
    case.slurm.record = replace(case.slurm.record, state="COMPLETING")
    ask_to_stop(case.attempt.folder, "preemption")
    assert case.conclude("interrupted") == ExitCode.INTERRUPTED and case.slurm.done == []


def preempted(record: JobRecord, **values) -> JobRecord:
    return replace(record, state="COMPLETING", fields={**record.fields, "PreemptTime": "1790000000"}, **values)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_job_that_is_preempted_for_good_goes_on(case, noticed):
    """PreemptMode=CANCEL: Slurm does not restart it. Its step may be gone before the leader has its signal."""
    case.slurm.record = preempted(case.slurm.record)
    if noticed:
        ask_to_stop(case.attempt.folder, "preemption")
    assert case.conclude("interrupted") == 0 and case.slurm.done == [("requeue", "7")]
    assert case.past.stop_reason == "preemption"


def test_a_job_that_slurm_puts_back_itself_needs_nothing(case):
    case.slurm.record = replace(case.slurm.record, state="COMPLETING", restarts=1)
    case.conclude("interrupted")
    assert case.slurm.done == [] and case.past.decision == "requeue" and "restarts the job itself" in case.past.why


def test_a_step_that_the_time_limit_ended_goes_on_and_says_that_the_margin_was_short(case):
    case.slurm.record = replace(case.slurm.record, state="COMPLETING", reason="TimeLimit")
    ask_to_stop(case.attempt.folder, "time-limit")
    file = case.attempt.folder / "stop-reason.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "at": json.loads(file.read_text())["at"] - 105}))
    assert case.conclude("interrupted") == 0 and case.slurm.done == [("requeue", "7")]
    assert "(time-limit) 105 s before, too late" in case.past.message and "run.stop_margin_s" in case.past.message


def test_a_node_on_which_it_crashes_twice_goes_into_the_ledger_and_out(case):
    before = [PastAttempt(attempt=1, job_id="7", status="crash", step_before=0, step=3, at=0, nodes=("n002",))]
    assert case.conclude("crash", before=before, nodes=("n002",)) == 70
    assert case.slurm.options["exclude"] == "n002" and case.ledger.excluded() == ("n002",)
