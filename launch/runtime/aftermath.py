"""After an attempt: finds out whether a node was at fault, decides what follows, and does it. A failure on the way is
logged and does not prevent what follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.config.load import LoadedConfig, load_config
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.files.shared import write_atomically
from launch.health.check import Check, checks_from_json
from launch.health.ledger import Ledger
from launch.health.verdict import judge
from launch.run.attempt_log import PastAttempt, append, read_history
from launch.run.attempts import Attempt
from launch.run.find import JOB_FILE, attempts_of, read_json
from launch.run.node_files import all_nodes
from launch.run.outcome import Outcome
from launch.run.stop import stop_reason, stopping_for_s
from launch.runtime.decide import CRASHES, Decision, decide
from launch.slurm.client import Slurm
from launch.slurm.job_facts import JobFacts
from launch.slurm.records import JobRecord
from launch.slurm.refusals import SlurmError, names
from launch.slurm.same_job import options_like

BLAMED = ("node_failure", "hardware_fault")
HARDWARE = ("gpu.count", "gpu.lost", "gpu.ecc", "gpu.rows", "gpu.nvlink", "gpu.pcie", "nic.count", "nic.state",
            "nic.rate")
"""Checks that show a fault of the node after a crash. Other checks find effects of the crash itself, the user or
another job: full disks, missing files, processes that still hold memory."""


@dataclass
class Aftermath:
    """What the leader does after its processes have ended."""

    slurm: Slurm
    facts: JobFacts
    attempt: Attempt
    ledger: Ledger
    loaded: LoadedConfig
    words: Sequence[str]
    """Overrides of the job."""
    before: Sequence[PastAttempt]
    """Attempts that led to this job without user action in between."""
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.slurm = self.slurm.patient(self.say)

    def with_evidence(self, outcome: Outcome) -> Outcome:
        """The outcome, corrected by evidence. A crash or hang is a hardware fault if checks find one. Faulty nodes go
        into the ledger. If Slurm ended the attempt after a stop request, the stop margin was too short."""
        if outcome.status in ("crash", "hang"):
            found = self._found()
            if found:
                lines = "; ".join(f"{node}: {check.name}: {check.evidence}" for node, check in found.items())
                outcome = outcome.model_copy(update={"status": "hardware_fault", "nodes": tuple(found), "message":
                                                     f"{lines}\nseen as: {outcome.message}"})
        if outcome.status in BLAMED:
            self._blame(outcome.status, outcome.message, outcome.nodes)
        if outcome.status == "interrupted" and stop_reason(self.attempt.folder) not in (None, "user"):
            asked = f"{stop_reason(self.attempt.folder)}) {stopping_for_s(self.attempt.folder):.0f} s before"
            outcome = outcome.model_copy(update={"message": f"{outcome.message}; a stop was requested ({asked}, "
                                                 "too late for the step and the checkpoint: raise run.stop_margin_s"})
        return outcome

    def conclude(self, past: PastAttempt, code: ExitCode | None) -> int:
        """Decide, write the attempt's line, and carry out the decision. Returns the exit code of the job.

        Args:
            code: exit code of an error that defines its own.
        """
        run, record = self.loaded.config.run, None
        decision = decide(past, self.before, run.max_attempts)
        if past.status == "interrupted" or not decision.ends_the_run:
            record = self._record()
            past = _with_slurms_reason(past, record, self.facts)
            decision = self._as_slurm_has_it(decide(past, self.before, run.max_attempts), record)
        if run.rehearse and not decision.ends_the_run:
            decision = replace(decision, action="stop", why=f"{decision.why}; rehearsals are not repeated")
        exit_code = code if code is not None and decision.ends_the_run else decision.exit_code
        past = past.model_copy(update={"decision": decision.action, "why": decision.why, "exit_code": int(exit_code)})
        self.say(f"{decision.action}: {decision.why}")
        self._note(past)            # first, because the next actions may end this process or fail
        if decision.by_slurm:
            return int(exit_code)
        if past.status in CRASHES:
            self._blame(past.status, past.message, decision.exclude)
        if not decision.ends_the_run:
            return self._go_on(past, record)
        if decision.action == "done" or exit_code == ExitCode.NO_PROGRESS:
            self._cancel_successors()
        return int(exit_code)

    # ---- going on --------------------------------------------------------------------------------------------------

    def _go_on(self, past: PastAttempt, record: JobRecord | None) -> int:
        """Requeue or submit, as decided, else the other way: a site may forbid either, or the partition lacks nodes.

        Args:
            record: Slurm's record of this job, if it was just read.
        """
        ways = [lambda: self._requeue(past), lambda: self._submit(past, record)]
        for way in ways if past.decision == "requeue" else reversed(ways):
            code = way()
            if code is not None:
                return int(code)
        exit_code = past.exit_code or int(ExitCode.UNFINISHED)
        self.say("the run can continue, but no job continues it: submit the job again")
        why = f"{past.why}; neither requeued nor submitted: see the job's output"
        self._note(past.model_copy(update={"exit_code": exit_code, "why": why}))
        return exit_code

    def _requeue(self, past: PastAttempt) -> ExitCode | None:
        """Requeue this job. Returns None if Slurm refuses."""
        if not self.facts.requeue:
            return None
        if past.decision != "requeue":
            self._note(past.model_copy(update={"decision": "requeue"}))
        self.say("requeueing: Slurm restarts the job after about two minutes at the earliest")
        try:
            self.slurm.requeue(self.facts.job_id)
        except SlurmError as error:
            record = self._record()
            if record is None or record.restarts <= self.facts.restart_count:   # else only the answer was lost
                self.say(f"not requeued: {error.what}")
                return None
        return ExitCode.OK

    def _submit(self, past: PastAttempt, record: JobRecord | None) -> ExitCode | None:
        """Submit a new job with the same script, shape and overrides, without the bad nodes: the exclusions of a
        running job cannot be changed, and a requeue may return the bad node. Returns None if no job was submitted."""
        script = (self.attempt.folder / "job.sbatch").resolve()
        try:
            record = record or self.slurm.show_job(self.facts.job_id)
            text = self.slurm.batch_script(self.facts.job_id)
            write_atomically(script, text, mode=0o600)
            sizes, bad = self._shape(past)
            like = [*options_like(record, text), *([f"--exclude={','.join(bad)}"] if bad else []),
                    *([f"--chdir={record.work_dir}"] if record.work_dir != self.facts.submit_dir else [])]
            successor = self._first_taken(script, [[*like, f"--nodes={nodes}"] for nodes in sizes])
        except (UserError, OSError) as error:
            self.say(f"no new job was submitted: {error}")
            return None
        self.say(f"job {successor} continues the run" + (f", without {', '.join(bad)}" if bad else ""))
        code = ExitCode(past.exit_code or ExitCode.UNFINISHED)      # dependent jobs must wait for the whole run
        self._note(past.model_copy(update={"decision": "fresh", "successor": successor, "excluded": bad,
                                           "exit_code": int(code)}))
        return code

    def _first_taken(self, script: Path, choices: Sequence[Sequence[str]]) -> str:
        """Submit with the first options whose number of nodes Slurm accepts. Returns the job id."""
        folder = Path(self.facts.submit_dir) if self.facts.submit_dir else None
        for number, options in enumerate(choices):
            try:
                return self.slurm.submit_once(script, self.words, options, name=self.facts.name,
                                              cwd=folder if folder and folder.is_dir() else None)
            except SlurmError as error:
                if number == len(choices) - 1 or "nodes" not in names(error):
                    raise
                self.say(f"{options[-1]}: {error.what}")
        raise AssertionError("there is always a choice")

    def _shape(self, past: PastAttempt) -> tuple[list[str], tuple[str, ...]]:
        """(values of --nodes to try in turn, nodes to exclude). Excluded are the user's exclusions, the ledger's nodes
        (capped by the size of the partition), and the nodes that this preflight refused, which may not be in the
        ledger, as long as enough nodes remain. If fewer remain than the run's first job had, the job takes the
        remaining ones, down to `run.min_nodes`."""
        first = self._first_job()
        wanted = len(first.get("nodes", self.facts.nodes))
        least = min(self.loaded.config.run.min_nodes or wanted, wanted)
        usable = self.slurm.usable(self.facts.partition, self.facts.reservation)
        users = tuple(first.get("excluded", self.facts.excluded))
        self.ledger.cluster_nodes = len(usable)
        bad: list[str] = []
        for node in dict.fromkeys((*self.ledger.excluded(), *(past.nodes if past.status == "preflight" else ()))):
            if len(set(usable) - {*users, *bad, node}) >= least:
                bad.append(node)
            else:
                self.say(f"{node} is bad but not excluded: fewer than {least} nodes would remain in partition "
                         f"{self.facts.partition}")
        left = sum(fit for node, fit in usable.items() if node not in (*users, *bad))
        sizes = [] if least < wanted and left < wanted else [str(wanted)]
        sizes += [f"{min(wanted - 1, max(least, left))}-{wanted}"] if least < wanted else []
        return sizes, tuple(dict.fromkeys((*users, *bad)))

    def _first_job(self) -> dict:
        """The recorded facts of the job that the user submitted: its nodes and the user's exclusions. A follow-up job
        also excludes nodes automatically, and those exclusions expire."""
        if not self.before:
            return {}
        return read_json(self.attempt.run_folder / "attempts" / str(self.before[0].attempt) / JOB_FILE)

    def _record(self) -> JobRecord | None:
        """Slurm's current record of this job."""
        try:
            return self.slurm.show_job(self.facts.job_id)
        except SlurmError as error:
            self.say(f"could not read the state of this job from Slurm: {error.what}")
            return None

    def _as_slurm_has_it(self, decision: Decision, job: JobRecord | None) -> Decision:
        """The decision, adapted to Slurm's record. A cancelled job is not resubmitted; a preempted one continues. A job
        that Slurm restarts itself, after a node failure or a preemption, needs no action."""
        if job is None:
            return decision
        if job.restarts > self.facts.restart_count:
            return Decision("requeue", decision.exit_code, f"{decision.why}; Slurm restarts the job itself",
                            by_slurm=True)
        if _preempted(job):
            return decision
        if job.state == "CANCELLED" or (job.state == "COMPLETING" and job.reason != "TimeLimit"):
            return Decision("stop", decision.exit_code or ExitCode.INTERRUPTED,
                            f"the job was cancelled ({decision.why})")
        return decision

    # ---- the end of the run ----------------------------------------------------------------------------------------

    def _cancel_successors(self) -> None:
        """Cancel waiting jobs of this run, which have nothing to do: a chain submitted beforehand, or a new job of an
        earlier attempt. Other runs share the job name, which comes from the script. A job belongs to this run if it has
        the same command and folder and the configuration still names the same run. Array jobs are skipped: they share
        one command, but each has its own run."""
        if self.loaded.config.run.rehearse:
            return
        commands = {(each.get("command"), each.get("submit_dir")) for each in
                    (read_json(folder / JOB_FILE) for folder in attempts_of(self.attempt.run_folder))}
        successors = {past.successor for past in read_history(self.attempt.run_folder)}
        try:
            waiting = [self.slurm.show_job(job.job_id) for job in self.slurm.queue(name=self.facts.name)
                       if job.state == "PENDING" and job.job_id != self.facts.job_id and not job.of_array]
            of_this_run = [job for job in waiting
                           if job.job_id in successors or (job.command, job.work_dir) in commands]
            if of_this_run and not _same_run(self.loaded, self.words):
                return self.say(f"{self.loaded.path} now names another run: waiting jobs are not cancelled")
            for job in of_this_run:
                self.slurm.cancel(job.job_id)
                self.say(f"cancelled job {job.job_id}, which was waiting to continue this run")
        except SlurmError as error:
            self.say(f"jobs waiting for this one could not be cancelled: {error.what}")

    def _note(self, past: PastAttempt) -> None:
        """Write the attempt's line. A later line replaces it; without a line the next attempt reads the outcome."""
        try:
            append(self.attempt.run_folder, past)
        except OSError as error:
            self.say(f"attempts.jsonl could not be written: {error}")

    # ---- whose fault it was ----------------------------------------------------------------------------------------

    def _blame(self, status: str, message: str, nodes: Sequence[str]) -> None:
        reason = f"{status.replace('_', ' ')}: {(message.splitlines() or [''])[0]}"
        self.ledger.record([(node, reason, self._evidence(node)) for node in nodes], self.facts.job_id, self.say)

    def _found(self) -> dict[str, Check]:
        """Hardware faults of each node after the failure, judged as in the preflight: a check that the user skips or
        that half of the nodes fail does not blame a node."""
        reports = {}
        for files in all_nodes(self.attempt):
            try:
                text = (files.folder / "aftermath.json").read_text(encoding="utf-8")
                checks = checks_from_json(json.loads(text))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, UserError) as error:
                self.say(f"{files.node}: its checks after the failure cannot be read: {error}")
                continue
            reports[files.node] = [check for check in checks if check.name.startswith(HARDWARE)]
        config = self.attempt.folder / "config.yaml"
        skipped = self.attempt.asked().run.skip_checks if config.exists() else ()
        verdict = judge(reports, 0, skip=skipped)
        return {node: exclusion.checks[0] for node, exclusion in verdict.excluded.items()}

    def _evidence(self, node: str) -> str:
        folder = self.attempt.folder / "nodes" / node
        return str(next((folder / name for name in ("aftermath.json", "beat") if (folder / name).exists()), folder))


def _same_run(loaded: LoadedConfig, words: Sequence[str]) -> bool:
    """Whether the configuration still names the same run. Its file may have been edited since."""
    try:
        run, now = loaded.config.run, load_config(loaded.path, words).config.run
    except UserError:
        return False
    return (run.dir, run.name, bool(run.rehearse)) == (now.dir, now.name, bool(now.rehearse))


def _with_slurms_reason(past: PastAttempt, record: JobRecord | None, facts: JobFacts) -> PastAttempt:
    """Adds the reason from Slurm's record if Slurm ended the job and its signal came too late, or never."""
    if past.status != "interrupted" or past.stop_reason is not None or record is None:
        return past
    if record.restarts > facts.restart_count or _preempted(record):
        return past.model_copy(update={"stop_reason": "preemption"})
    return past.model_copy(update={"stop_reason": "time-limit"}) if record.reason == "TimeLimit" else past


def _preempted(record: JobRecord) -> bool:
    return record.fields.get("PreemptTime", "") not in ("", "None")
