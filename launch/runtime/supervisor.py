"""The supervisor of one node of a job: the only task that Slurm starts there (`megatron-rl node ATTEMPT`).

It greets, checks its node, waits for the placement, starts the workload's processes on this node, watches them, and
ends them. It finds processes by handle and by the mark and node name in their environment, because simulated nodes
share a host. It always exits with 0, so that Slurm never kills ranks that are still saving. It reports through files
(`launch.run.node_files`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from launch import envvars
from launch.errors import UserError
from launch.files.shared import names_in, read_shared, seen, write_atomically
from launch.files.waiting import LOOK_EVERY_S, listed
from launch.health import network, network_run
from launch.health.check import checks_to_json, write_report
from launch.health.expected import FILE as EXPECTED
from launch.health.expected import Expected
from launch.health.node import CheckContext, check_node
from launch.ports import Ports, allocate
from launch.run import components, node_files
from launch.run import progress as progress_file
from launch.run.attempts import Attempt
from launch.run.components import Failure, NodeComponents
from launch.run.node_files import Beat, Hello, NodeFiles, greeting
from launch.run.outcome import read_outcome
from launch.run.stop import Reason, ask_to_stop
from launch.runtime import caches, hang, teardown
from launch.runtime.workloads import NodeContext, Running, workload_of

WITHOUT_LEADER_S = 120.0
"""A leader without a sign of life for this long, or twice `run.node_silent_s` if longer, is dead, and so is the job."""
SAVING = ("save", "export")
SAVING_S = 1800.0
"""The same while a checkpoint is written, which is worth more than the minutes that Slurm takes to end the step."""
WATCH_EVERY_S = 1.0
"""Interval of the checks of running processes. Every node reads the shared file system at this rate, for days."""
PORTS_S = 60.0
"""How long a supervisor tries to find a free block of ports, in seconds."""


class Ended(Exception):
    """The leader has ended the attempt, or is dead."""


def supervise(attempt_folder: str) -> int:
    """Entry point. Returns the exit code of the task."""
    node = envvars.get("SLURMD_NODENAME")
    if not node:
        raise UserError("SLURMD_NODENAME is not set: this runs only inside a Slurm job", where="megatron-rl node",
                        fix="submit a job instead: megatron-rl launch CONFIG --on slurm")
    envvars.set_for_this_process(caches.variables())
    return Supervisor(Attempt(Path(attempt_folder)), node).run()


class Supervisor:
    """One node's part of an attempt."""

    def __init__(self, attempt: Attempt, node: str) -> None:
        self.attempt, self.node = attempt, node
        self.files = NodeFiles(attempt, node)
        self.leader = node_files.BeatWatch({"leader": attempt.folder / node_files.LEADER_BEAT}, self.files.beat)
        self.leader_silent_s = WITHOUT_LEADER_S
        self.components = NodeComponents(attempt, node)
        self.running: Running | None = None
        self.signalled: list[int] = []

    def run(self) -> int:
        """Run the node's part, from the greeting to the end."""
        self.files.folder.mkdir(parents=True, exist_ok=True)
        self._catch_signals()
        log = os.open(self.files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)     # Slurm's file pattern would use the name of the host
        os.dup2(log, 2)
        os.close(log)
        beat = Beat(self.files.beat)
        try:
            self._take_part()
        except Ended as reason:
            self.say(str(reason))
        except Exception as error:
            self._failed(error)
        finally:
            self._clean_up()
            self._look_again()
            beat.stop()
            self.files.gone.touch()
        return 0

    def _take_part(self) -> None:
        ports = self._claim_ports()
        try:
            hello = greeting(self.node, ports)
            self.files.write_hello(hello)
            if removed := teardown.remove_leftovers(self.attempt, self.node):
                self.say(f"removed shared memory left by earlier attempts: {listed(removed)}")
            write_report(self.files.folder, self.node, check_node(self._check_context(self.attempt.folder)))
            self._until_placed(hello)
            self.leader_silent_s = max(WITHOUT_LEADER_S, 2 * self.attempt.config().run.node_silent_s)
            if self.node not in self.attempt.placement().nodes:
                self.say("this is a spare node: no process is started here")
                self._until(lambda: False, WATCH_EVERY_S)
            self._work(ports)
        finally:
            ports.release()

    def _until_placed(self, hello: Hello) -> None:
        """Wait for the placement. Take part in the network measurement if the leader requests one before that."""
        placement = self.attempt.folder / "placement.json"
        self._until(lambda: seen(placement) or network.Task.read(self.attempt.folder) is not None)
        if not placement.exists():
            members = network_run.start(self.attempt.folder, self.node, hello.interface)
            self._until(lambda: all(member.returncode is not None for member in members))
            self._until(lambda: seen(placement))

    def _claim_ports(self) -> Ports:
        """Claim this node's block of ports. This may take a while on a node that a job has just left, or if many
        simulated nodes share the host."""
        self._until(lambda: seen(self.attempt.folder / EXPECTED))
        pinned = Expected.read(self.attempt.folder).port_base
        seed = int(envvars.get("SLURM_PROCID", "0")) + int(envvars.get("SLURM_JOB_ID", "0"))
        deadline = time.monotonic() + PORTS_S
        while True:
            self._check()
            try:
                return allocate(seed, pinned=pinned)
            except UserError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)     # there is no event for a port that becomes free

    def _check_context(self, attempt: Path | None) -> CheckContext:
        hello = self.files.hello()
        return CheckContext(self.node, Expected.read(self.attempt.folder), attempt, mark=self.attempt.mark,
                            address=hello.address if hello else None)

    def _work(self, ports: Ports) -> None:
        """Start the workload and watch it until the leader ends the attempt."""
        workload = workload_of(self.attempt.config())
        with _ignored(signal.SIGUSR1, signal.SIGUSR2), _blocked(signal.SIGTERM):
            self.running = workload.start(NodeContext(self.attempt, self.node, ports, self._check, self.say))
        taken = False
        while True:
            self._check()
            lost = self._lost()
            if lost is not None and not self._ending():
                components.report_lost(self.attempt, self.node, lost)
            if not taken and seen(self.attempt.folder / node_files.STACKS_WANTED):
                taken = True
                hang.write_stacks(self.attempt, self.node, hang.take_stacks(self.attempt, node=self.node))
            time.sleep(WATCH_EVERY_S)  # between two checks of processes and files

    def _ending(self) -> bool:
        """Whether the job is shutting down, so that processes that end now are expected to."""
        progress = progress_file.read_progress(self.attempt.folder)
        return read_outcome(self.attempt.folder) is not None or progress is not None and progress.is_in("end")

    def _lost(self) -> Failure | None:
        """The failure on this node, if any. A component that recorded an error comes first, then one that died
        silently, then a process that the workload started."""
        ours = [record for record in self.components.look() if record.name != "driver"]
        if {f"{record.name}.json" for record in ours} & set(names_in(self.attempt.folder / "errors", ".json")):
            names = {record.name for record in ours}
            for error in components.errors(self.attempt):
                if error.name in names:
                    return Failure(error.name, str(self.attempt.logs / f"{error.name}.log"),
                                   error.summary if error.user_error else f"{error.name} failed first: {error.summary}",
                                   error.user_error, error.pid)
        for record in ours:
            if not record.alive():
                return components.silent_death(record)
        for child in self.running.children if self.running else ():
            if child.returncode is not None:
                return Failure(child.name, str(child.log),
                               f"{child.name} on {self.node} ended with status {child.returncode} without an error")
        return None

    def _until(self, condition: Callable[[], bool], every_s: float = LOOK_EVERY_S) -> None:
        """Wait for the leader. The leader's deadlines bound this wait: it writes `end` or falls silent."""
        while not condition():
            self._check()
            time.sleep(every_s)     # the leader communicates through a shared file system

    def _check(self) -> None:
        """Raises Ended if the attempt is over."""
        self.leader.look()
        while self.signalled:
            self._pass_on(signal.Signals(self.signalled.pop(0)))
        if seen(self.attempt.folder / node_files.END):
            raise Ended("the leader has ended the attempt")
        if self.leader.silent(self.leader_silent_s) and (self.leader.silent(SAVING_S) or not self._saving()):
            raise Ended(f"no sign of life from the leader for {self.leader_silent_s:.0f} s")

    def _pass_on(self, number: signal.Signals) -> None:
        """A signal to the step is a request to stop. TERM does not mean to end at once: a preemption with a grace time
        begins with it, and the grace time is for a checkpoint. The leader asks Slurm what TERM means and writes `end`
        if the job is over. Otherwise Slurm's KILL follows."""
        reason: Reason = "signal" if number == signal.SIGUSR1 else "preemption"
        ask_to_stop(self.attempt.folder, reason, f"{number.name} at {self.node}")
        if number != signal.SIGUSR1:
            (self.attempt.folder / node_files.TERMINATED).touch()

    def _saving(self) -> bool:
        progress = progress_file.read_progress(self.attempt.folder)
        return progress is not None and progress.is_in(*SAVING)

    def _failed(self, error: Exception) -> None:
        """Report the failure to the leader and wait until it ends the attempt."""
        users = isinstance(error, UserError)
        self.say(str(error) if users else traceback.format_exc())
        message = str(error) if users else f"{type(error).__name__}: {error}"
        components.report_lost(self.attempt, self.node, Failure(
            f"supervisor of {self.node}", str(self.files.log), message, users))
        with contextlib.suppress(Ended):
            self._until(lambda: False, WATCH_EVERY_S)

    def _clean_up(self) -> None:
        """End processes with the attempt's mark and this node's name. There is no grace, because they block TERM."""
        outcome = read_outcome(self.attempt.folder)
        if removed := teardown.end_all(self.attempt, self.node):
            self.say(f"removed shared memory left by this attempt: {listed(removed)}")
        if self.running is not None:
            self.running.close(failed=outcome is None or outcome.status in ("crash", "hang"))

    def _look_again(self) -> None:
        """Repeat the checks if the leader requests it after a failure: a GPU that fell off the bus shows now."""
        end = read_shared(self.attempt.folder / node_files.END)
        if end and end.get("check"):
            checks = check_node(self._check_context(None))
            write_atomically(self.files.folder / "aftermath.json", json.dumps(checks_to_json(checks)), durable=True)

    def _catch_signals(self) -> None:
        """Record `scancel --signal=USR1 JOB` and a preemption's TERM, which reach the step. See `_pass_on`."""
        def note(number: int, frame: FrameType | None) -> None:
            self.signalled.append(number)

        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def say(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.node}: {text}", flush=True)


@contextlib.contextmanager
def _ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Processes started inside ignore these signals. A signal to the step reaches all processes, and would kill those
    without a handler. (The job's own components install their handlers later.)"""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Processes started inside, and their children, never get this signal. A preemption's TERM reaches every process of
    the step, and the handlers of Ray and vLLM would end theirs. Ignoring the signal is not enough, because a handler
    replaces that; the signal mask stays."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


