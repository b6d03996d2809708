"""The leader's part of one attempt of a Slurm job: supervisors, preflight, placement, watching, the end."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from launch import envvars
from launch.cluster.file import load_cluster
from launch.config.load import LoadedConfig
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.files.shared import seen, write_atomically
from launch.files.waiting import listed, wait_for
from launch.health import canary, rails
from launch.health.check import Check, critical
from launch.health.expected import expected_of
from launch.health.gather import gather_reports
from launch.health.ledger import Ledger
from launch.health.network_run import with_network
from launch.health.verdict import Verdict, judge, record
from launch.plan.plan import Placement
from launch.planner.prepare import OnCluster
from launch.processes import Child, start
from launch.report.run.display import make_display
from launch.run import node_files
from launch.run.attempt_log import PastAttempt, record_of
from launch.run.attempts import Attempt
from launch.run.components import record_error
from launch.run.faults import trains
from launch.run.find import JOB_FILE
from launch.run.node_files import Beat, Hello, NodeFiles
from launch.run.outcome import Outcome, Status, write_outcome
from launch.run.stop import stop_requested
from launch.runtime import endings
from launch.runtime.aftermath import Aftermath
from launch.runtime.job_plan import greeting_s, place_job, plan_job, switches_of_job, with_start_deadline
from launch.runtime.stop_clock import JobIsOver, Signals, StopClock
from launch.runtime.summary import print_end
from launch.runtime.watch import View, Watch
from launch.runtime.workloads.train import TOKEN_FILE
from launch.slurm.client import Slurm
from launch.slurm.container import folders_of
from launch.slurm.job_facts import JobFacts
from launch.slurm.margin import check_time_left, needed, stop_margin
from launch.slurm.profiles import Profile, load_profile
from launch.slurm.step import step

TEARDOWN_S = 90.0
"""How long the supervisors may take to end their processes and to check their nodes after a failure, in seconds."""
STEP_S = 5.0
"""How long the step may take to end after its tasks have ended, in seconds."""
CHECKED_AFTER = ("crash", "hang", "node_failure")


class StopDuringStart(Exception):
    """A stop was requested before the first step."""


def say(text: str) -> None:
    """A line of the job's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} leader: {text}", flush=True)


@dataclass
class Leader:
    """One attempt."""

    slurm: Slurm
    facts: JobFacts
    signals: Signals
    loaded: LoadedConfig
    path: str
    words: tuple[str, ...]
    attempt: Attempt
    ledger: Ledger
    history: list[PastAttempt]
    """All attempts of the run before this one."""
    before: list[PastAttempt]
    """Attempts that led to this job without user action in between."""
    profile: Profile = field(default_factory=Profile)
    step: Child | None = None
    lag_s: float = 0.0
    """Seconds for a file to be seen on another node and back, as the preflight measured it on the slowest node."""

    def run(self) -> int:
        """Run the attempt, end it, and do what follows. Returns the exit code of the job."""
        folder = self.attempt.folder
        write_atomically(folder / JOB_FILE, self.facts.model_dump_json(indent=1), durable=True)
        beat = Beat(folder / node_files.LEADER_BEAT)
        self.clock = StopClock(self.attempt, self.facts, self.slurm, self.signals, say)
        if self.facts.controller_ahead_s:
            say(f"warning: the controller's clock differs from this node's by {self.facts.controller_ahead_s:+.0f} s; "
                "the time limit follows the controller's clock")
        try:
            outcome, code = self._ended()
        except Exception as error:
            outcome, code = self._unforeseen(error), None
        write_outcome(folder, outcome)      # before the teardown, which may hang
        after = Aftermath(self.slurm, self.facts, self.attempt, self.ledger, self.loaded, self.words, self.before, say)
        try:
            self._tear_down(outcome)
            outcome = after.with_evidence(outcome)
            write_outcome(folder, outcome)
        except Exception:
            say(f"after the attempt: {traceback.format_exc()}")     # the decision must be made nevertheless
        with suppress(OSError):     # the head's node removes it, unless that node died
            (folder / TOKEN_FILE).unlink(missing_ok=True)
        beat.stop()
        self._tell(outcome)
        past = record_of(self.attempt, self.facts.job_id, outcome, self.history)
        return after.conclude(past, code)

    def _ended(self) -> tuple[Outcome, ExitCode | None]:
        """How the attempt ended, and the exit code if it differs from the outcome's."""
        try:
            return self._attempt(), None
        except endings.EndedEarly as early:
            return early.outcome, ExitCode.SLURM if early.outcome.status == "user_error" else None
        except StopDuringStart:
            return endings.during_start_up(self.attempt), None
        except JobIsOver as reason:
            return self._over(str(reason)), None
        except UserError as error:
            status: Status = "preflight" if error.exit_code == ExitCode.PREFLIGHT else "user_error"
            return endings.ended(self.attempt, status, str(error), nodes=self._unfit()), error.exit_code

    def _over(self, reason: str) -> Outcome:
        """Slurm also ends a job after a node failure, possibly before the leader notices. In that case the heartbeats
        of that node stopped before the others."""
        gone = node_files.vanished(self.attempt)
        if gone:
            return endings.ended(self.attempt, "node_failure", f"no sign of life from {listed(gone)}\n{reason}",
                                 nodes=gone)
        return endings.ended(self.attempt, "interrupted", reason)

    def _unforeseen(self, error: Exception) -> Outcome:
        """An unexpected error in the leader is a crash: the job ends, and what follows is decided as usual."""
        if isinstance(error, OSError) and error.errno in endings.NO_SPACE:
            return endings.no_space(self.attempt, error)
        summary, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        say(f"the leader failed: {trace}")
        record_error(self.attempt, "leader", summary, trace)
        return endings.ended(self.attempt, "crash", f"the leader failed: {summary}", "leader", self.facts.log)

    # ---- the attempt ---------------------------------------------------------------------------------------------

    def _attempt(self) -> Outcome:
        config = self.loaded.config
        self.profile = load_profile(config.run.profile)
        if late := self.profile.too_late(envvars.get(envvars.SITE, "")):
            say(f"warning profile.late: {', '.join(late)} of {config.run.profile} cannot change this job's batch "
                "script; `megatron-rl launch CONFIG --on slurm --profile FILE` writes a script with them")
        cluster = load_cluster(config.cluster)
        expected_of(config, cluster, cluster.gpu.device, profile=self.profile, computes=trains(config),
                    cpus=self.facts.cpus_per_node).write(self.attempt.folder)
        self.step = srun = self._start_supervisors()
        with _answering(self.attempt):
            made = plan_job(self.path, self.words, self.loaded, self.facts)
        self._keep_margin(made)
        hellos = self._hellos(greeting_s(config.run.deadline_s, self.profile))
        verdict = self._preflight(made, hellos, config.run.deadline_s)
        made, placement = self._place(made, hellos, verdict)
        with make_display(config.run.name, config.run.steps) as display:
            return Watch(self.attempt, made.config, placement, srun,
                         View(self.attempt.folder, display), self.clock.tick, say).run()

    def _start_supervisors(self) -> Child:
        """Start one step with a supervisor on every node."""
        command, environment = step(
            [sys.executable, "-m", "launch", "node", str(self.attempt.folder.resolve())], nodes=self.facts.nodes,
            cpus=self.facts.cpus_per_node, profile=self.profile,
            folders=[self.attempt.run_folder, *folders_of(self.loaded.config)], wait_s=0)
        say(f"attempt {self.attempt.number}: supervisors are starting ({self.attempt.folder})")
        return start("srun", command, log=self.attempt.logs / "srun.log", environment=environment)

    def _keep_margin(self, made: OnCluster) -> None:
        """Set the stop margin to what this plan needs, and check that the time left exceeds it."""
        config, plan = made.config, made.plan
        self.clock.margin_s = stop_margin(config, plan, self.profile)
        self.clock.warned_in_time = not config.run.rehearse
        left_s = None if self.facts.end_time is None else self.facts.end_time - time.time()
        check_time_left(left_s, self.facts.time_limit, self.clock.margin_s, needed(plan, self.profile))

    def _hellos(self, deadline_s: float) -> dict[str, Hello]:
        """The greetings of all nodes that arrive by the deadline."""
        found: dict[str, Hello] = {}

        def missing() -> list[str]:
            for files in (NodeFiles(self.attempt, node) for node in self.facts.nodes if node not in found):
                if (hello := files.hello()) is not None:
                    found[files.node] = hello
            return [node for node in self.facts.nodes
                    if node not in found and NodeFiles(self.attempt, node).failure() is None]

        late = wait_for(missing, "to greet", deadline_s, say=say, check=self._check)
        if late:
            say(f"no supervisor within {deadline_s:.0f} s on {listed(late)}")
        return found

    def _preflight(self, made: OnCluster, hellos: dict[str, Hello], deadline_s: float) -> Verdict:
        """Collect the findings of every node, including those that did not greet, and return the verdict."""
        came = [node for node in self.facts.nodes if node in hellos]
        found = gather_reports(self.attempt.folder, came, deadline_s, say=say, check=self._check)
        self._check()
        reports = {node: found[node] if node in found else [self._absent(node)] for node in self.facts.nodes}
        reports = with_network(self.attempt, self.loaded.config, self.before, reports, hellos, made.cluster,
                              self.profile, say, self._check)
        verdict = judge(reports, made.needed, made.spares, self.ledger.readable(say),
                        skip=self.loaded.config.run.skip_checks)
        write_atomically(self.attempt.folder / "verdict.json", json.dumps(verdict.to_json(), indent=1))
        for line in self._grouped(verdict.warnings):
            say(f"preflight warning: {line}")
        for node, exclusion in verdict.excluded.items():
            say(f"excluded {node}: {exclusion.reason}")
        record(verdict, self.ledger, {node: self.attempt.folder / "nodes" / node / "preflight.json"
                                      for node in verdict.excluded}, self.facts.job_id, say)
        self.verdict, self.reports = verdict, reports
        self.lag_s = max((float(check.value) for checks in reports.values() for check in checks
                          if check.name == "fs.round_trip"), default=0.0)
        self.clock.margin_s += self.lag_s       # delay until the stop request and the last checkpoint are visible
        if verdict.critical and not verdict.only_short:
            raise UserError("the preflight failed: " + "; ".join(verdict.critical),
                            where=str(self.attempt.folder / "verdict.json"),
                            fix="follow the remedies in that file", exit_code=ExitCode.PREFLIGHT)
        return verdict

    def _grouped(self, lines: Sequence[str]) -> list[str]:
        """Lines of the form `node: text`, merged over all nodes with the same text."""
        nodes_of: dict[str, list[str]] = {}
        for line in lines:
            node, colon, text = line.partition(": ")
            known = bool(colon) and node in self.facts.nodes
            nodes_of.setdefault(text if known else line, []).extend([node] if known else [])
        return [f"{listed(nodes)}: {text}" if nodes else text for text, nodes in nodes_of.items()]

    def _absent(self, node: str) -> Check:
        """The finding for a node whose supervisor did not greet."""
        files = NodeFiles(self.attempt, node)
        return critical("supervisor.absent", None, files.failure() or "no supervisor started on this node",
                        f"see {files.log}; a node without this file did not start the step's task")

    def _place(self, made: OnCluster, hellos: dict[str, Hello], verdict: Verdict) -> tuple[OnCluster, Placement]:
        switches = switches_of_job(hellos, verdict.accepted, self.slurm, say)
        made, placement, smaller = place_job(made, verdict.accepted, verdict.avoid, hellos, self.attempt.number,
                                             switches)
        made = with_start_deadline(made, self.profile)
        if smaller:
            say(f"too few fit nodes for the whole plan: continuing with {smaller}")
        plan = made.plan
        nics = rails.for_nccl(self.reports, placement.nodes, made.cluster.nics_per_node, self.profile, say)
        placement = placement.model_copy(update={"nics": nics})
        self.attempt.write(made.loaded.config, plan, placement, envvars.recordable())
        spares = f", spare: {listed(placement.spares)}" if placement.spares else ""
        say(f"plan {plan.fingerprint()} placed on {listed(placement.nodes)}{spares}")
        write_atomically(self.attempt.folder / "slurm-calls.json", json.dumps(self.slurm.calls))
        return made, placement

    # ---- while it runs -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Called while the job starts: a stop request or the end of the step ends the wait."""
        self.clock.tick()
        if stop_requested(self.attempt.folder):
            raise StopDuringStart
        if self.step is not None and self.step.returncode is not None:
            raise endings.EndedEarly(endings.before_it_began(self.attempt, self.step.returncode, self.step.log,
                                                             self.facts.nodes))

    def _unfit(self) -> tuple[str, ...]:
        verdict = getattr(self, "verdict", None)
        return tuple(verdict.excluded) if verdict is not None else ()

    def _tear_down(self, outcome: Outcome) -> None:
        """End everything, even if something hangs: the supervisors end themselves, or else Slurm ends their step.
        `srun` would wait for the task of a dead node until Slurm notices the failure, so it is ended earlier."""
        write_atomically(self.attempt.folder / node_files.END,
                         json.dumps({"check": outcome.status in CHECKED_AFTER}), durable=True)
        step = self.step
        if step is None:
            return
        dead = outcome.nodes if outcome.status == "node_failure" else ()
        alive = [files for files in node_files.all_nodes(self.attempt) if files.node not in dead]
        answers = canary.Answers(self.attempt.folder)       # a supervisor that still checks its node waits for one
        left = wait_for(lambda: [files.node for files in alive if step.returncode is None and not seen(files.gone)],
                        "to end", TEARDOWN_S + self.lag_s, say=say, check=answers.give)
        if left:
            say(f"{listed(left)} did not end within {TEARDOWN_S + self.lag_s:.0f} s: Slurm ends the step")
        patience_s = 0.0 if dead and not left else STEP_S       # srun would wait for the dead node
        if step.wait(patience_s) is None:
            step.end(grace_s=patience_s)

    def _tell(self, outcome: Outcome) -> None:
        """Print the summary of the run. An error here must not prevent what follows."""
        if outcome.status == "stopped":
            return say(f"stopped {outcome.message or f'after step {outcome.step}, with a checkpoint'}")
        try:
            print_end(self.attempt, outcome)
        except Exception as error:
            say(f"no report: {type(error).__name__}: {error}")


@contextmanager
def _answering(attempt: Attempt) -> Iterator[None]:
    """Answers the canaries of the nodes while the leader plans."""
    answers, ended = canary.Answers(attempt.folder), threading.Event()

    def run() -> None:
        while not ended.wait(canary.LOOK_EVERY_S):
            answers.give()

    thread = threading.Thread(target=run, name="canary", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
