"""Measure the network: `python -m megatron_rl.network_check ATTEMPT RANK`, one process for each member of the task.

The members first all-reduce together. Then all pairs of nodes exchange data in rounds of disjoint pairs, each member
with its counterpart. All received data is checked. Rank 0 writes the result (`launch.health.network.Result`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from launch.health.network import Pair, Result, Task, rounds
from megatron_rl.stores import meet, tcp_store

PATTERN = 251
"""A prime, so that a shift by any power of two is detected. Sums over 2^16 members stay exact in fp32."""


def main(arguments: list[str]) -> int:
    """Return exit status 0 once the result is written. Rank 0 also writes a result if the measurement fails."""
    folder, rank = Path(arguments[0]), int(arguments[1])
    task = Task.read(folder)
    if task is None:
        print(f"{folder} holds no task", file=sys.stderr)
        return 2
    try:
        result = measure(task, rank)
    except (RuntimeError, OSError, TimeoutError) as error:  # what torch, gloo and NCCL raise
        print(f"{task.members[rank].node}: {error}", file=sys.stderr)
        if rank == 0:
            Result(task.allreduce_bytes, 0.0, members=len(task.members),
                   errors=_blamed(task, error)).write(folder)
        return 1
    if rank == 0:
        result.write(folder)
    return 0


def measure(task: Task, rank: int) -> Result:
    """Take part as member `rank`. Only rank 0 returns the complete result.

    Raises:
        TimeoutError: a member did not arrive. The message names it.
        RuntimeError: gloo or NCCL failed.
    """
    timeout = timedelta(seconds=task.timeout_s)
    names = [f"{member.node}#{index}" for index, member in enumerate(task.members)]
    store = tcp_store(task.members[0].address, task.port, host=rank == 0, timeout=timeout)
    meet(store, rank, names, timeout)
    device = torch.device("cuda" if task.backend == "nccl" else "cpu")
    dist.init_process_group(task.backend, store=dist.PrefixStore("fabric", store), rank=rank, world_size=len(names),
                            timeout=timeout)
    try:
        found = _Member(task, rank, device).run()
        store.set(f"found/{rank}", json.dumps(found))
        if rank:
            store.wait(["done"], timeout)   # rank 0 hosts the store, so it leaves last
            return Result(0, 0.0)
        everybody = [json.loads(store.get(f"found/{each}")) for each in range(len(names))]
        store.set("done", "1")
        return _combined(task, everybody)
    finally:
        dist.destroy_process_group()


class _Member:
    """Measurements of one member: times in seconds, and the first wrong data."""

    def __init__(self, task: Task, rank: int, device: torch.device) -> None:
        self.task, self.rank, self.device = task, rank, device
        nodes = list(dict.fromkeys(member.node for member in task.members))
        self.per_node = len(task.members) // len(nodes)
        self.nodes, self.node = nodes, rank // self.per_node
        self.wrong = ""

    def run(self) -> dict:
        reduce_s = self._all_reduce()
        pairs = {}
        for disjoint in rounds(len(self.nodes)):
            partner = next((a + b - self.node for a, b in disjoint if self.node in (a, b)), None)
            dist.barrier()                  # rounds do not overlap, so a pair shares its nodes' network with no other
            if partner is not None:
                pairs[partner] = self._exchange(partner * self.per_node + self.rank % self.per_node)
        return {"allreduce_s": reduce_s, "pairs": pairs, "wrong": self.wrong}

    def _all_reduce(self) -> float:
        world, count = len(self.task.members), self.task.allreduce_bytes // 4
        mine_N = self._pattern_N(self.rank, count)
        sum_N = torch.empty_like(mine_N)
        seconds = self._best(lambda: dist.all_reduce(sum_N), before=lambda: sum_N.copy_(mine_N))
        right_N = world * self._pattern_N(0, count) + world * (world - 1) / 2
        self._compare(sum_N, right_N, "the all-reduce's sum")
        return seconds

    def _exchange(self, partner: int) -> float:
        count = self.task.pair_bytes // 4
        out_N = self._pattern_N(self.rank, count)
        in_N = torch.empty_like(out_N)

        def both_ways() -> None:
            requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, out_N, partner),
                                               dist.P2POp(dist.irecv, in_N, partner)])
            for request in requests:
                request.wait()

        seconds = self._best(both_ways, before=lambda: in_N.zero_(), together=False)
        self._compare(in_N, self._pattern_N(partner, count), f"data from {self.task.members[partner].node}")
        return seconds

    def _best(self, act: Callable[[], object], *, before: Callable[[], object], together: bool = True) -> float:
        """Seconds of the fastest repeat, after one untimed repeat that connects."""
        best = float("inf")
        for repeat in range(self.task.repeats + 1):
            before()
            if together:
                dist.barrier()
            self._settle()
            began = time.perf_counter()
            act()
            self._settle()
            if repeat:
                best = min(best, time.perf_counter() - began)
        return best

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _pattern_N(self, rank: int, count: int) -> torch.Tensor:
        return (torch.arange(count, device=self.device) % PATTERN + rank).to(torch.float32)

    def _compare(self, found_N: torch.Tensor, right_N: torch.Tensor, what: str) -> None:
        if not torch.equal(found_N, right_N) and not self.wrong:
            count = int((found_N != right_N).sum())
            self.wrong = f"{what} arrived wrong in {count:,} of {right_N.numel():,} elements"


def _combined(task: Task, everybody: list[dict]) -> Result:
    nodes = list(dict.fromkeys(member.node for member in task.members))
    per_node = len(task.members) // len(nodes)
    slowest: dict[tuple[int, int], float] = {}
    for rank, found in enumerate(everybody):
        for partner, seconds in found["pairs"].items():
            node, other = rank // per_node, int(partner)
            pair = (min(node, other), max(node, other))
            slowest[pair] = max(slowest.get(pair, 0.0), seconds)
    return Result(
        task.allreduce_bytes, max(found["allreduce_s"] for found in everybody), members=len(everybody),
        pairs=tuple(Pair((nodes[a], nodes[b]), task.pair_bytes / seconds)
                    for (a, b), seconds in sorted(slowest.items())),
        wrong={task.members[rank].node: found["wrong"] for rank, found in enumerate(everybody) if found["wrong"]})


def _blamed(task: Task, error: Exception) -> dict[str, str]:
    """Nodes to blame for an error: those that the message names as absent, otherwise all. A closed connection has two
    ends, and rank 0 also receives errors of other nodes, so any other message singles out no node."""
    named = str(error).partition(": ")[2].partition(" did not come")[0].split(", ")
    absent = {member.node for index, member in enumerate(task.members) if f"{member.node}#{index}" in named}
    return {member.node: str(error).splitlines()[0] for member in task.members
            if member.node in absent or not absent}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
