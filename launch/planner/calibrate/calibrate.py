"""Refits the few coefficients of a site to runs made there, and writes them into the cluster file.

The plan of each run is computed again from its configuration, with the lengths of the run. Then, phase by phase:

    train     = updates x pre-training time / eta + updates x t_update      eta = rl.train_efficiency
    log-prob  = passes x train x forward / training x factor                factor = rl.logprob_factor
    rollout   = generation / eta_r + responses x t_response                 eta_r = rl.rollout_efficiency
    sync      = wire(NIC efficiency) + what grows with bytes + fixed        fixed = sync.pause_s + sync.barrier_s

Train and rollout each have a slope and a fixed cost. One run gives one number: it sets the slope and keeps the fixed
cost of the file. Runs of different sizes set both, by least squares of the relative error. Rollout refits eta_r and not
the engine's host time, because a run measures the total time of an output token, not its terms. Scaling the total keeps
the dependence on batch and context, which was fitted to many published points. See docs/calibration.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from launch.cluster.calibration import with_coefficients
from launch.cluster.file import load_cluster
from launch.cluster.spec import ClusterSpec
from launch.coefficients.site import SiteCoefficients
from launch.errors import UserError
from launch.planner.calibrate.run import CalibrationRun, read_run
from launch.planner.search.candidate import Candidate

MOST_FIXED = 0.9
"""Maximum share of a measured phase for a fixed cost. With a larger share, the run refutes the fixed cost."""
APART = 1.2
"""Slope over fixed cost must differ by this factor between two runs to fit both."""
BULK_BYTES = 64 << 20
"""A transfer with fewer bytes through its busiest NIC measures latency, not the NIC's rate."""
LEAST_NIC, MOST_NIC = 1e-3, 1.0
"""Range in which a NIC's efficiency is sought."""
RL, SYNC = "coefficients.rl", "coefficients.sync"
ENDS = ("_low", "_high")
"""Suffixes of the ends of an efficiency's range. The range moves with the efficiency."""


@dataclass(frozen=True)
class Change:
    """A changed coefficient of the file."""

    key: str
    old: float
    new: float


@dataclass(frozen=True)
class RunOfPhase:
    """A phase of one run, in seconds: one measurement and two predictions."""

    run: str
    measured: float
    before: float
    """Predicted with the old coefficients of the file."""
    after: float
    """Predicted with the new ones."""


@dataclass(frozen=True)
class PhaseFit:
    phase: str
    changes: tuple[Change, ...]
    """() if the coefficients were kept; `note` gives the reason."""
    runs: tuple[RunOfPhase, ...]
    note: str = ""


@dataclass(frozen=True)
class Calibration:
    cluster_file: str
    runs: tuple[CalibrationRun, ...]
    phases: tuple[PhaseFit, ...]


@dataclass
class _Fitting:
    """The file's coefficients while they are refitted."""

    spec: ClusterSpec
    runs: tuple[CalibrationRun, ...]
    values: dict[str, float]
    """The coefficients of the file by key, with those fitted so far."""

    def candidates(self) -> list[Candidate]:
        return [run.candidate(replace(self.spec, coefficients=dict(self.values))) for run in self.runs]

    def value(self, key: str) -> float:
        group, name = key.removeprefix("coefficients.").split(".")
        return getattr(getattr(SiteCoefficients.of(self.values), group), name)

    def set(self, new: dict[str, float]) -> tuple[Change, ...]:
        """Set coefficients. The ends of their ranges keep their relative distance."""
        changes = []
        for key, value in new.items():
            old = self.value(key)
            ends = [key + end for end in ENDS if hasattr(SiteCoefficients().rl, key.rpartition(".")[2] + end)]
            changes.append(Change(key, old, value))
            changes += [Change(end, self.value(end), self.value(end) * value / old) for end in ends]
        self.values.update({change.key: change.new for change in changes})
        return tuple(changes)


def calibrate(run: Path, cluster_file: str, *others: Path) -> Calibration:
    """Refit the coefficients of a cluster file to one run or several, and write them into it.

    Args:
        run: a run's folder, or one of its attempts (`runs/NAME/attempts/2`).
        others: runs of other sizes (prompts per step, lengths, model). They separate slopes from fixed costs.

    Raises:
        UserError: see `launch.planner.calibrate.run.read_run`; a run used another kind of GPU than the file describes;
            the file cannot be read or written. The file is then unchanged.
    """
    spec = load_cluster(cluster_file)
    runs = tuple(read_run(path) for path in (run, *others))
    for each in runs:
        _check_kind(each, spec, cluster_file)
    fitting = _Fitting(spec, runs, dict(spec.coefficients))
    before = [phase_seconds(found) for found in fitting.candidates()]
    fitted = {"train": _train(fitting), "log-prob": _logprob(fitting), "rollout": _rollout(fitting),
              "sync": _sync(fitting)}
    changed = {change.key: change.new for changes, _ in fitted.values() for change in changes}
    if changed:
        spec = with_coefficients(cluster_file, changed, ", ".join(each.name for each in runs))
    after = [phase_seconds(each.candidate(spec)) for each in runs]
    phases = tuple(
        PhaseFit(phase, changes, tuple(
            RunOfPhase(each.name, each.measured[phase], old[phase], new[phase])
            for each, old, new in zip(runs, before, after, strict=True)
            if phase in each.measured and phase in old), note)
        for phase, (changes, note) in fitted.items())
    return Calibration(cluster_file, runs, phases)


def phase_seconds(found: Candidate) -> dict[str, float]:
    """Predicted seconds of the recipe's phases, by the names of `launch.planner.calibrate.measured`."""
    training = found.training
    every = {"rollout": found.rollout.seconds, "reward": found.reward.seconds, "log-prob": training.passes_s,
             "train": training.train_s, "sync": found.sync_s}
    return {name: value for name, value in every.items() if value}


def _check_kind(run: CalibrationRun, spec: ClusterSpec, cluster_file: str) -> None:
    if run.plan.forecast.cluster.gpu != spec.gpu.name:
        raise UserError(f"{run.name} ran on {run.plan.forecast.cluster.gpu}, {cluster_file} describes {spec.gpu.name}",
                        where=f"{cluster_file}, gpus.kind",
                        fix="calibrate the file of the machine that the run was made on")


_Fit = tuple[tuple[Change, ...], str]
"""The changed coefficients, and a note."""


def _train(fitting: _Fitting) -> _Fit:
    eta, fixed = f"{RL}.train_efficiency", f"{RL}.update_s"

    def terms(found: Candidate) -> tuple[float, float]:
        updates = found.problem.workload.updates * found.problem.workload.epochs
        return (found.training.train_s - updates * fitting.value(fixed)) * fitting.value(eta), updates

    return _slope_and_fixed(fitting, "train", eta, fixed, terms, "A second run with more or fewer prompts per step")


def _rollout(fitting: _Fitting) -> _Fit:
    def terms(found: Candidate) -> tuple[float, float]:
        return found.rollout.engine_s, found.problem.workload.sequences

    return _slope_and_fixed(fitting, "rollout", f"{RL}.rollout_efficiency", f"{RL}.response_s", terms,
                            "A second run with responses of another length")


def _logprob(fitting: _Fitting) -> _Fit:
    factor = f"{RL}.logprob_factor"
    points = [(seconds / fitting.value(factor), 0.0, run.measured["log-prob"])
              for run, found in zip(fitting.runs, fitting.candidates(), strict=True)
              if (seconds := found.training.passes_s) and run.measured.get("log-prob")]
    if not points:
        return (), "no run has a log-prob pass"
    return fitting.set({factor: _slope(points, 0.0)}), ""


def _slope_and_fixed(fitting: _Fitting, phase: str, efficiency: str, fixed: str,
                     terms: Callable[[Candidate], tuple[float, float]], apart: str) -> _Fit:
    """Refit `slope / efficiency + count x fixed`.

    Args:
        terms: candidate of a run -> (slope, count).
        apart: names runs with another ratio of the two, for the note.
    """
    points = [(*terms(found), run.measured[phase])
              for run, found in zip(fitting.runs, fitting.candidates(), strict=True) if run.measured.get(phase)]
    if not points:
        return (), "not measured"
    both = _both(points)
    if both is not None:
        return fitting.set({efficiency: 1 / both[0], fixed: both[1]}), ""
    cost = fitting.value(fixed)
    share = max(count * cost / measured for _, count, measured in points)
    if share <= MOST_FIXED:
        return fitting.set({efficiency: 1 / _slope(points, cost)}), ""
    halved = median(measured / count for _, count, measured in points) / 2
    note = (f"{fixed} = {cost:.3g} s alone would take {share:.2g} x the measured phase; the measurement does not "
            f"separate it from the rest, so each gets half. {apart} would separate them")
    return fitting.set({efficiency: 1 / _slope(points, halved), fixed: halved}), note


def _slope(points: Sequence[tuple[float, float, float]], cost: float) -> float:
    """x that minimises the sum of ((x slope + cost count - measured) / measured)^2."""
    return (sum(slope / measured * (1 - cost * count / measured) for slope, count, measured in points)
            / sum((slope / measured) ** 2 for slope, _, measured in points))


def _both(points: Sequence[tuple[float, float, float]]) -> tuple[float, float] | None:
    """(x, y) that minimise the sum of ((x slope + y count - measured) / measured)^2 with x > 0, y >= 0; None if the
    runs do not determine both."""
    ratios = [slope / count for slope, count, _ in points]
    if max(ratios) < APART * min(ratios):
        return None
    a = [slope / measured for slope, _, measured in points]
    b = [count / measured for _, count, measured in points]
    aa, bb, ab = (sum(p * q for p, q in zip(u, v, strict=True)) for u, v in ((a, a), (b, b), (a, b)))
    determinant = aa * bb - ab * ab
    x = (bb * sum(a) - ab * sum(b)) / determinant
    y = (aa * sum(b) - ab * sum(a)) / determinant
    if y < 0:
        return _slope(points, 0.0), 0.0
    return (x, y) if x > 0 else None


def _sync(fitting: _Fitting) -> _Fit:
    many = len(fitting.spec.nodes) > 1
    runs = [run for run in fitting.runs
            if run.measured.get("sync") and (run.plan.forecast.cluster.nodes > 1 or not many)]
    if not runs:
        return (), ("weights stayed in one node, but the file describes several" if many else "not measured")
    changes, said = _nic(fitting, runs)
    pause, barrier = f"{SYNC}.pause_s", f"{SYNC}.barrier_s"
    fixed = fitting.value(pause) + fitting.value(barrier)
    seconds = {run.name: found.sync_s for run, found in zip(fitting.runs, fitting.candidates(), strict=True)}
    points = [(run.measured["sync"], seconds[run.name] - fixed) for run in runs]
    new = (sum((1 - rest / measured) / measured for measured, rest in points)
           / sum(1 / measured ** 2 for measured, _ in points))
    if new <= 0:
        beyond = "the predicted sync without fixed costs takes longer than the measured one: fixed costs kept"
        return changes, "; ".join(filter(None, (said, beyond)))
    if not fixed:
        return (*changes, *fitting.set({pause: new})), said
    scaled = {key: fitting.value(key) * new / fixed for key in (pause, barrier)}
    return (*changes, *fitting.set(scaled)), said


def _nic(fitting: _Fitting, runs: Sequence[CalibrationRun]) -> _Fit:
    """Refit the NIC's efficiency to the transfer alone, if enough bytes pass a NIC to measure it."""
    key = f"{SYNC}.nic_efficiency"
    named = {run.name for run in runs}

    def wires() -> list[tuple[float, float, int]]:
        """(predicted, measured seconds, bytes through the busiest NIC) of each transfer."""
        return [(found.sync.cost.wire_s, run.transfer_s,
                 max(found.sync.cost.trainer_nic_out_bytes, found.sync.cost.rollout_nic_in_bytes))
                for run, found in zip(fitting.runs, fitting.candidates(), strict=True)
                if run.name in named and run.transfer_s and found.sync is not None]

    if not any(size >= BULK_BYTES for _, _, size in wires()):
        return (), f"less than {BULK_BYTES >> 20} MiB passes a NIC: its efficiency is kept, the rest counts as fixed"

    def excess(efficiency: float) -> float:
        fitting.values[key] = efficiency
        return sum(predicted / measured - 1 for predicted, measured, size in wires() if size >= BULK_BYTES)

    old = fitting.value(key)
    low, high = LEAST_NIC, MOST_NIC
    if excess(high) > 0 or excess(low) < 0:
        why = "faster than at line rate" if excess(high) > 0 else f"slower than at {low:g} of the line rate"
        fitting.values[key] = old
        return (), f"the transfer was {why}: nic_efficiency kept"
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if excess(middle) < 0 else (middle, high)
    fitting.values[key] = old
    return fitting.set({key: high}), ""
