"""The coordinator's comparisons: the members' parts before the first byte, and their weights after the last."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_rl.weight_sync.plan.copies import Holding
from megatron_rl.weight_sync.plan.manifest import SyncManifest
from megatron_rl.weight_sync.plan.streams import EdgeKey, Stream
from megatron_rl.weight_sync.protocol import (
    Held,
    SyncError,
    TransferReport,
    engine_name,
    member_name,
    trainer_name,
)

SHOWN = 8
"""Parameters that a message names."""


def compare_digests(edges: Collection[EdgeKey], sent: Sequence[TransferReport],
                    received: Sequence[TransferReport]) -> None:
    """VERIFY: for every edge of the manifest, the destination's live weights must equal what the source holds.

    Raises:
        SyncError: naming every edge whose digests differ, that one side did not report, or that is not in the
            manifest.
    """
    sources: dict[EdgeKey, int] = {key: value for report in sent for key, value in report.digests.items()}
    live: dict[EdgeKey, int] = {key: value for report in received for key, value in report.digests.items()}
    wrong = []
    for key in sorted({*edges, *sources, *live}):
        if key not in edges:
            wrong.append(f"{_edge(key)}: a digest of an edge that the manifest does not have")
        elif sources.get(key) is None or sources.get(key) != live.get(key):
            found = [f"{d:016x}" if d is not None else "no digest" for d in (sources.get(key), live.get(key))]
            wrong.append(f"{_edge(key)}: source {found[0]}, live {found[1]}")
    if wrong:
        raise SyncError("the engines do not hold what the trainer sent\n" + "\n".join(wrong))


def compare_replicas(alike: Sequence[Sequence[Holding]], sent: Sequence[TransferReport]) -> None:
    """VERIFY: trainer ranks that hold the same elements must hold the same values. Otherwise engines that receive from
    different ranks would serve different policies, each equal to its own source.

    Args:
        alike: what `held_alike` returned.

    Raises:
        SyncError: naming the parameters that differ, with the ranks that hold each value.
    """
    found = {report.member: report.shared for report in sent}
    wrong = []
    for holdings in alike:
        ranks_of: dict[int | None, list[str]] = {}
        for rank, name in holdings:
            ranks_of.setdefault(found.get(trainer_name(rank), {}).get(name), []).append(trainer_name(rank))
        if len(ranks_of) > 1 or None in ranks_of:
            wrong.append(f"{holdings[0][1]}: " + "; ".join(
                f"{f'{digest:016x}' if digest is not None else 'no digest'} on {', '.join(ranks)}"
                for digest, ranks in ranks_of.items()))
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise SyncError("\n".join([f"{len(wrong)} parameters differ between training ranks that must hold the same",
                                   *wrong[:SHOWN], *more]))


def compare_held(manifest: SyncManifest, members: Collection[str], held: Sequence[Held | None]) -> None:
    """Before the first byte, check that every member has the route and the streams that were proved.

    Raises:
        SyncError: naming every member, and each of its streams, whose fingerprint differs or is missing.
    """
    route, streams = manifest.route_fingerprint(), manifest.stream_fingerprints()
    reported = {each.member: each for each in held if each is not None}
    on = {member_name(member): streams for member, streams in manifest.streams_of.items()}
    wrong = []
    for member in sorted({*members, *reported}):
        mine = {stream.number: stream for stream in on.get(member, ())}
        if member not in reported:
            wrong.append(f"{member}: holds nothing, the manifest has route {route}")
            continue
        theirs = reported[member]
        if theirs.route != route:
            wrong.append(f"{member}: holds route {theirs.route}, the manifest {route}")
        for number in sorted({*mine, *theirs.streams}):
            ours, found = streams[number] if number in mine else "none", theirs.streams.get(number, "nothing")
            if ours != found:
                what = f"stream {number}" + (f" ({_text(mine[number])})" if number in mine else "")
                wrong.append(f"{member}: of {what} it holds {found}, the manifest {ours}")
    if wrong:
        raise SyncError("the members do not hold the manifest that was proved\n" + "\n".join(wrong))


def _text(stream: Stream) -> str:
    return f"{trainer_name(stream.rank)} -> {', '.join(engine_name(*receiver) for receiver in stream.receivers)}"


def _edge(key: EdgeKey) -> str:
    rank, replica, worker = key
    return f"{trainer_name(rank)} -> {engine_name(replica, worker)}"
