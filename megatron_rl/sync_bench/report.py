"""The output of `megatron-rl sync bench`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.sync_bench.compare import Part
from megatron_rl.sync_bench.measure import Bench


def as_text(bench: Bench) -> str:
    """Tables, at most 120 columns wide."""
    return "\n".join(_lines(bench))


def _lines(bench: Bench) -> Iterator[str]:
    untried = "" if bench.backend == "gloo" else " (this path has not been run on GPUs yet)"
    yield (f"{bench.processes} processes on {bench.what}, {bench.backend}{untried}, route {bench.route}; "
           f"{bench.report.nbytes / 1e6:.1f} MB per sync, over all edges; lanes opened in {bench.opening_s:.2f} s")
    yield from _alone(bench)
    yield from _sync(bench)
    yield from _pauses(bench)
    yield from _edges(bench)
    yield from ("", "for `coefficients:` of a cluster file (--write FILE puts them there):")
    yield from (f"  {key}: {value:.6g}" for key, value in bench.found.items())


def _alone(bench: Bench) -> Iterator[str]:
    known, rates = bench.coefficients, bench.rates
    yield from ("", f"{'one process, alone':<32}{'predicted':>14}{'measured':>14}")
    for name, predicted, measured in (
            ("lane, large buckets", known.nic_efficiency * bench.nic_bandwidth, bench.lane.rate),
            ("memcpy", None, rates.memcpy), ("pack", known.copy_rate, rates.pack),
            ("unpack", known.copy_rate, rates.unpack), ("digest", known.digest_rate, rates.digest)):
        yield f"{name:<32}{_rate(predicted):>14}{_rate(measured):>14}"
    yield f"{'a bucket besides its bytes':<32}{_time(known.chunk_latency_s):>14}{_time(bench.lane.chunk_s):>14}"


def _sync(bench: Bench) -> Iterator[str]:
    yield from ("", f"{'one sync':<32}{'predicted':>14}{'measured':>14}{'residual':>14}")
    yield from (_part(part.name, part) for part in bench.parts)
    for name, key in (("prepare", "prepare"), ("pack, slowest rank", "pack"), ("send, slowest rank", "send"),
                      ("unpack, slowest worker", "unpack"), ("verify: compare", "verify"), ("commit", "commit")):
        yield f"  {name:<30}{'':>14}{_time(bench.report.seconds[key]):>14}"


    yield from ("", f"{'buffers for buckets, at most':<32}{'planned':>14}{'allocated':>14}")
    for name, planned, allocated in zip(("a training rank", "a worker"), bench.planned_staging, bench.staging,
                                        strict=True):
        yield f"{name:<32}{_size(planned):>14}{_size(allocated):>14}"


def _pauses(bench: Bench) -> Iterator[str]:
    """Predictions include the time to pause a busy engine. These engines are idle."""
    yield from ("", f"{'an idle engine serves nothing':<32}{'predicted':>14}{'measured':>14}{'residual':>14}")
    yield from (_part(f"staging {part.name}", part) for part in bench.pauses)


def _part(name: str, part: Part) -> str:
    return (f"{name:<32}{_time(part.predicted_s):>14}{_time(part.measured_s):>14}"
            f"{_time(part.residual_s, signed=True):>14}")


def _edges(bench: Bench) -> Iterator[str]:
    yield from ("", f"{'edge':<46}{'planned':>12}{'sent':>12}{'predicted':>12}{'measured':>12}{'residual':>12}")
    for edge in bench.edges:
        yield (f"{edge.name:<46}{_size(edge.planned_bytes):>12}{_size(edge.bytes):>12}{_time(edge.predicted_s):>12}"
               f"{_time(edge.measured_s):>12}{_time(edge.residual_s, signed=True):>12}")
    if any(None in (edge.planned_bytes, edge.bytes) for edge in bench.edges):
        yield "- if only one of the two has the edge: the sync did not follow the planned route"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:,.2f} GB/s"


def _size(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.2f} MB"


def _time(value: float | None, *, signed: bool = False) -> str:
    return "-" if value is None else f"{value * 1e3:+,.2f} ms" if signed else f"{value * 1e3:,.2f} ms"


def as_document(bench: Bench) -> dict:
    """For `--json`: rates in bytes/s, times in seconds."""
    return {"backend": bench.backend, "route": bench.route, "processes": bench.processes, "on": bench.what,
            "bytes": bench.report.nbytes, "opening_s": bench.opening_s, "seconds": bench.report.seconds,
            "staging": {"planned": bench.planned_staging._asdict(), "allocated": bench.staging._asdict()},
            "lane": bench.lane._asdict(), "rates": bench.rates._asdict(),
            "parts": [part._asdict() for part in bench.parts], "pauses": [part._asdict() for part in bench.pauses],
            "edges": [edge._asdict() | {"residual_s": edge.residual_s} for edge in bench.edges],
            "coefficients": bench.found}
