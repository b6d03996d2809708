"""The table of `make bench-sync`, and whether each target was met."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.sync_measure import Measured
from megatron_rl.sync_bench.rates import Rates

OF_BOUND, OF_TENSORS, OF_BUCKETS, OF_RING = 1.25, 4.0, 2.0, 1.0
METHODS = ("ours", "tensors", "buckets", "ring")
A_DOUBLING, OF_SYNC, OF_PREDICTION = 1.15, 0.10, 0.15


class Aim(NamedTuple):
    what: str
    said: str
    """The decisive number, or the reason why there is none."""
    met: bool | None
    """None if it cannot be judged."""


def table(rows: Sequence[Measured], rates: Rates, *, page: bool = False) -> str:
    """One line per case, the rates of one process, and the targets. The page only gets the number of targets that were
    met, and those that were not."""
    lines = [f"{'hosts':<6}{'layout':<26}{'route':<8}{'bound':>8}{'predicted':>11}{'ours':>8}{'/bound':>8}"
             f"{'tensors':>9}{'buckets':>9}{'ring':>9}{'verify':>8}{'plain':>7}{'spare':>7}  counts"]
    lines += [_line(row) for row in rows]
    lines += ["", f"{'min/median/max of the runs':<40}" + "".join(f"{name:>20}" for name in METHODS)]
    lines += [_spread(row) for row in rows]
    lines += ["",
              f"One process alone: memcpy {rates.memcpy / 1e9:.1f} GB/s, pack {rates.pack / 1e9:.1f}, unpack "
              f"{rates.unpack / 1e9:.1f}, digest {rates.digest / 1e9:.2f}: a digest costs "
              f"{rates.memcpy / rates.digest:.1f} times a memcpy.", ""]
    judged = aims(rows)
    if page:
        lines += [f"aims: {sum(aim.met is True for aim in judged)} met"]
    lines += [f"{'cannot be judged' if aim.met is None else 'met' if aim.met else 'missed':<17}{aim.what}: {aim.said}"
              for aim in judged if not (page and aim.met)]
    return "\n".join(lines)


def _line(row: Measured) -> str:
    seconds, case = row.seconds, row.setup.case
    ours, share = seconds["ours"], verify_share(row)

    def other(name: str) -> str:
        return f"{seconds[name]:.1f} s" if name in seconds else "-"

    counts = "yes" if not row.verdict.reasons else "invalid: " + "; ".join(row.verdict.reasons)
    return (f"{case.name:<6}{case.layout:<26}{row.prediction.chosen:<8}{row.bound_s:>6.2f} s{row.predicted_s:>9.2f} s"
            f"{ours:>6.2f} s{ours / row.bound_s:>8.2f}{other('tensors'):>9}{other('buckets'):>9}{other('ring'):>9}"
            f"{share:>8.1%}"
            f"{row.verdict.rate_share:>7.0%}{row.verdict.spare:>7.0%}  {counts}")


def _spread(row: Measured) -> str:
    def of(name: str) -> str:
        runs = row.runs.get(name)
        return "/".join(f"{seconds:.2f}" for seconds in (min(runs), row.seconds[name], max(runs))) if runs else "-"

    return f"{row.setup.case.name:<6}{row.setup.case.layout:<34}" + "".join(f"{of(name):>20}" for name in METHODS)


def verify_share(row: Measured) -> float:
    """Share of the whole sync for digests of the live weights in the slowest worker, which overlap the transfer, and
    for their comparison."""
    seconds = row.ours.seconds
    return (seconds["live_digest"] + seconds["verify"]) / seconds["total"]


def aims(rows: Sequence[Measured]) -> list[Aim]:
    """The targets of the table, in order."""
    by_name = {row.setup.case.name: row for row in rows}
    found = []
    for row in rows:
        if row.setup.case.baselines:
            ratio = row.seconds["ours"] / row.bound_s
            found.append(_judged([row], f"{row.setup.case.name}: at most {OF_BOUND} x the bound", f"{ratio:.2f} x",
                                 ratio <= OF_BOUND))
    if "4+4" in by_name and by_name["4+4"].setup.case.baselines:
        row = by_name["4+4"]
        for name, words, least in (("tensors", "a broadcast per tensor", OF_TENSORS),
                                   ("buckets", "packed broadcasts", OF_BUCKETS), ("ring", "a pipelined ring", OF_RING)):
            faster = row.seconds[name] / row.seconds["ours"]
            found.append(_judged([row], f"4+4: at least {least:g} x faster than {words}", f"{faster:.1f} x",
                                 faster >= least))
    found += _growth(rows)
    for row in rows:
        share = verify_share(row)
        found.append(_judged([row], f"{row.setup.case.name}: verification under {OF_SYNC:.0%} of the sync",
                             f"{share:.1%}", share < OF_SYNC))
    for row in rows:
        off = row.predicted_s / row.seconds["ours"] - 1
        found.append(_judged([row], f"{row.setup.case.name}: prediction within {OF_PREDICTION:.0%} of the measurement",
                             f"{row.predicted_s:.2f} s against {row.seconds['ours']:.2f} s, {off:+.0%}",
                             abs(off) <= OF_PREDICTION))
    return found


def _growth(rows: Sequence[Measured]) -> Iterator[Aim]:
    """Growth from one trainer host to more and more receivers."""
    grown = sorted((row for row in rows if row.setup.case.trainer_hosts == 1), key=lambda row: row.setup.case.engines)
    for fewer, more in itertools.pairwise(grown):
        doublings = math.log2(more.setup.case.engines / fewer.setup.case.engines)
        growth = (more.seconds["ours"] / fewer.seconds["ours"]) ** (1 / doublings) - 1
        yield _judged([fewer, more], f"{fewer.setup.case.name} to {more.setup.case.name}: at most "
                      f"{A_DOUBLING - 1:.0%} more per doubling", f"{growth:+.0%}", growth <= A_DOUBLING - 1)
    for row in grown:
        chosen, direct = row.prediction.chosen, row.prediction.routes["direct"].expected_s
        if row.setup.case.engines == 7 and chosen != "direct":
            yield _judged([row], f"1+7: `{chosen}` beats `direct`", f"{row.seconds['ours']:.2f} s against "
                          f"{direct:.2f} s predicted for direct", row.seconds["ours"] < direct)


def _judged(rows: Sequence[Measured], what: str, said: str, met: bool) -> Aim:
    """Invalid runs decide nothing."""
    invalid = [row.setup.case.name for row in rows if row.verdict.reasons]
    return Aim(what, f"{said}; {' and '.join(invalid)} invalid", None) if invalid else Aim(what, said, met)
