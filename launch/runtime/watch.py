"""Watches a placed job for the leader: progress, outcome, deaths, silent nodes, hangs. Reads only files of the attempt
and the state of the step's process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from launch.config.resolved import ResolvedConfig
from launch.files.shared import seen
from launch.files.waiting import listed, wait_for
from launch.plan.plan import Placement
from launch.processes import Child
from launch.report.run.display import Display
from launch.run import components, node_files
from launch.run import progress as progress_file
from launch.run.attempts import Attempt
from launch.run.metrics import Tail, metric_row
from launch.run.node_files import BeatWatch, NodeFiles
from launch.run.outcome import Outcome, read_outcome
from launch.run.stop import stop_requested
from launch.runtime import endings, hang

LOOK_EVERY_S = 0.5
DRIVER_GRACE_S = 10.0
"""How long the driver may take to report the cause of a death, in seconds: it knows more than the launcher, and may
continue without an engine."""
STACKS_S = 90.0
"""Deadline for every node to see the request for stacks and to take them, in seconds."""
MANY_SILENT_S = 600.0
"""How long a pause of the file system that silences most nodes may last, in seconds."""


class Watch:
    """Watches one placed attempt until it has ended.

    Args:
        step: the process of `srun`.
        tick: called in every round; turns deadlines and signals into stop requests.
    """

    def __init__(self, attempt: Attempt, config: ResolvedConfig, placement: Placement, step: Child, view: View,
                 tick: Callable[[], None], say: Callable[[str], None]) -> None:
        self.attempt, self.config, self.placement, self.step = attempt, config, placement, step
        self.view, self.tick, self.say = view, tick, say
        self.beats = BeatWatch({node: NodeFiles(attempt, node).beat for node in placement.nodes},
                               attempt.folder / node_files.LEADER_BEAT)
        self._nodes_looked_at, self._told_of_silence = -math.inf, False
        self._lost: list[components.Failure] = []
        self._moved: dict[tuple[str, float], tuple[float, float]] = {}
        """(name, begin) of each open span -> (its last sign of life, when that was seen)."""

    def run(self) -> Outcome:
        """Watch until the attempt ends, and return its outcome. Its processes may still run."""
        mourning: float | None = None
        while True:
            self.tick()
            self.view.update()
            self._look_at_nodes()
            written = read_outcome(self.attempt.folder)
            if written is not None:
                return self._with_cause(written)
            silent = self._silent()
            if silent is not None:
                return silent
            if self.step.returncode is not None:
                return self._step_ended()
            progress = progress_file.read_progress(self.attempt.folder)
            if stop_requested(self.attempt.folder) and (progress is None or progress.is_in("start")):
                return endings.during_start_up(self.attempt)
            mourning = (mourning or time.monotonic()) if self._lost else None
            if mourning is not None and time.monotonic() - mourning > DRIVER_GRACE_S:
                return self._with_cause(endings.failed(self.attempt, self._lost[0]))
            late = [] if mourning is not None or progress is None else self._overdue(progress)
            if progress is not None and late:
                return self._hung(progress.step, late)
            self.step.wait(LOOK_EVERY_S)

    def _look_at_nodes(self) -> None:
        """Read the files that every node has, at most once per heartbeat: the cost grows with the number of nodes."""
        if time.monotonic() - self._nodes_looked_at >= node_files.BEAT_EVERY_S:
            self._nodes_looked_at = time.monotonic()
            self.beats.look()
            self._lost = components.lost(self.attempt)

    def _silent(self) -> Outcome | None:
        """The outcome if a node has failed. If most nodes fall silent together, the nodes are not at fault: the file
        system or network has a pause, which may pass."""
        limit_s = self.config.run.node_silent_s
        silent = self.beats.silent(limit_s)
        if not self.beats.most(silent):
            self._told_of_silence = False
            return self._node_failed(silent) if silent else None
        who = (f"{len(silent)} of {len(self.placement.nodes)} nodes at the same time: the shared file system or the "
               "network")
        if not self._told_of_silence:
            self._told_of_silence = True
            self.say(f"no sign of life from {who}; waiting for at most {MANY_SILENT_S:.0f} s")
        if self.beats.most(self.beats.silent(limit_s + MANY_SILENT_S)):
            return endings.ended(self.attempt, "node_failure", f"no sign of life from {who}, for more than "
                                 f"{MANY_SILENT_S:.0f} s; no node is blamed")
        return None

    def _overdue(self, progress: progress_file.Progress) -> list[progress_file.Span]:
        """The open spans that hang, judged by changes seen while the file system answers, see `BeatWatch`."""
        watched_s, before = self.beats.watched_s, self._moved
        self._moved = {}
        for span in progress.open:
            at, seen_s = before.get((span.name, span.began), (None, 0.0))
            self._moved[span.name, span.began] = span.at, seen_s if at == span.at else watched_s
        return [span for span in progress.open
                if watched_s - self._moved[span.name, span.began][1] > progress_file.allowed_s(span, self.config)]

    def _step_ended(self) -> Outcome:
        """The outcome if the supervisors ended without a request. When a node fails, Slurm ends the whole job, possibly
        before the leader notices. In that case the heartbeats of that node stopped before the others."""
        gone = node_files.vanished(self.attempt)
        if gone:
            return self._node_failed(gone)
        for failure in components.lost(self.attempt):
            return endings.failed(self.attempt, failure)
        return endings.ended(self.attempt, "interrupted", f"Slurm ended the step (srun status {self.step.returncode}) "
                             "before the job ended", "srun", str(self.step.log))

    def _with_cause(self, outcome: Outcome) -> Outcome:
        """A crash may be a consequence of a node failure, which closed connections show long before missing heartbeats:
        check whether every node is still alive. Adds the node on which the component at fault ran."""
        if outcome.status != "crash":
            return outcome
        asked = self.beats.watched_s

        def missing() -> list[str]:
            self.beats.look()
            return self.beats.not_since(asked)

        gone = wait_for(missing, "to show a sign of life", self.config.run.node_silent_s, say=self.say, check=self.tick)
        if gone and not self.beats.most(gone):
            return self._node_failed(gone, outcome)
        return outcome.model_copy(update={"nodes": tuple(self._nodes_of({outcome.component}))})

    def _node_failed(self, nodes: Collection[str], seen: Outcome | None = None) -> Outcome:
        names = [node for node in self.placement.nodes if node in nodes]
        ran = ", ".join(record.name for record in components.components(self.attempt) if record.node in nodes)
        message = (f"no sign of life from {listed(names)}"
                   + (f", where {ran} ran" if ran else "") + (f"\nfirst seen as: {seen.message}" if seen else ""))
        return endings.ended(self.attempt, "node_failure", message, nodes=names)

    def _hung(self, step: int, late: Sequence[progress_file.Span]) -> Outcome:
        """Have every supervisor take the stacks of its node, and name the rank that the others wait for. If a node
        exceeds its silence limit in the meantime, the node has failed."""
        (self.attempt.folder / node_files.STACKS_WANTED).touch()
        folder = self.attempt.folder / "nodes"
        failed: list[Outcome] = []

        def missing() -> list[str]:
            self.beats.look()
            failed[:] = filter(None, [self._silent()])
            return [] if failed else [node for node in self.placement.nodes if not seen(folder / node / "stacks.json")]

        mute = wait_for(missing, "to take stacks", STACKS_S, say=self.say)
        if failed:
            return failed[0]
        stacks = hang.read_stacks(self.attempt)
        stacks += [hang.Stack(record.name, "silent", "", hang.stack_file(self.attempt, record.name))
                   for record in components.components(self.attempt) if record.node in mute]
        outcome = endings.hung(self.attempt, self.config, step, late, sorted(stacks, key=lambda stack: stack.name))
        return outcome.model_copy(update={"nodes": tuple(self._nodes_of({outcome.component}))})

    def _nodes_of(self, names: Collection[str | None]) -> list[str]:
        return sorted({record.node for record in components.components(self.attempt) if record.name in names})


class View:
    """Displays phases, steps and warnings as they appear."""

    def __init__(self, folder: Path, display: Display) -> None:
        self._folder, self._display, self._said = folder, display, ""
        self._metrics, self._warnings = Tail(folder / "metrics.jsonl"), Tail(folder / "warnings.jsonl")

    def update(self) -> None:
        """Display everything new."""
        progress = progress_file.read_progress(self._folder)
        if progress and (progress.step == 0 or progress.newest.name in progress_file.AFTER_THE_STEP):
            text = f"{progress.newest.name}: {progress.newest.detail}"
            if text != self._said:
                self._display.phase(text)
            self._said = text
        for row in map(metric_row, map(json.loads, self._metrics.poll())):
            self._display.step(int(row["step"]), row)
        for warning in map(json.loads, self._warnings.poll()):
            self._display.message(f"warning {warning['code']}: {warning['message']}")
