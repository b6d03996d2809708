"""Run a function on W real ranks and bring the results back.

    def _sum(rank: Rank, x: int) -> float:
        rank.init_gloo()                                   # or megatron_rl.trainer.parallel.initialise(...)
        ...

    results = run_ranks(4, _sum, 3, timeout=60)            # results[r] is what rank r returned

Ranks fork from one server process that has torch, Megatron and transformers loaded, so four of them start in well
under a second. `function` must be a module-level function; it, its arguments and its results must pickle.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Callable

from launch.ports import BLOCK, Ports, allocate
from tests.patience import patient

PRELOAD = (
    "numpy", "torch", "torch.distributed", "torch.distributed.checkpoint", "safetensors.torch",
    "megatron.core", "megatron.core.parallel_state", "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt.gpt_model", "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.dist_checkpointing",
    "transformers.modeling_rope_utils", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3", "pydantic",
)
_NEXT = itertools.count()


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


@dataclass(frozen=True)
class Rank:
    """What a rank function gets as its first argument."""

    rank: int
    world: int
    address: str
    port: int
    timeout_s: float

    def init_gloo(self) -> None:
        """Plain `torch.distributed` on gloo, with this run's deadline."""
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://{self.address}:{self.port}", rank=self.rank,
                                world_size=self.world, timeout=timedelta(seconds=self.timeout_s))


@functools.cache
def _block() -> Ports:
    """A block of ports that no job and no other run of the tests takes while this process lives."""
    return allocate(address="127.0.0.1")


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, out of this process's block."""
    for _ in range(BLOCK - 1):
        port = _block().base + 1 + next(_NEXT) % (BLOCK - 1)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"all {BLOCK} ports from {_block().base} on are in use")


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(Rank, *args)` in `world` processes and return their results in rank order.

    Raises:
        RankError: with the traceback of the rank that failed first, or, past `timeout` seconds, with the Python
            stack of every rank that has not answered. No process is left behind in any case.
    """
    context = multiprocessing.get_context("forkserver")
    # The server of all ranks starts with these; gloo's own guess is the interface of the host's name.
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    context.set_forkserver_preload(list(PRELOAD))
    payload = pickle.dumps((function, args))
    port = free_port()
    with tempfile.TemporaryDirectory() as stacks:
        processes, pipes = [], []
        for r in range(world):
            receive, send = context.Pipe(duplex=False)
            rank = Rank(r, world, "127.0.0.1", port, patient(timeout))
            arguments = (rank, payload, send, str(Path(stacks, f"{r}")))
            process = context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            send.close()
            processes.append(process)
            pipes.append(receive)
        try:
            return _collect(processes, pipes, time.monotonic() + patient(timeout), Path(stacks))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(processes: list, pipes: list, deadline: float, stacks: Path) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipes[r]: r for r in range(len(pipes)) if r not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(waiting.values())
            told = "\n".join(f"--- rank {r}\n{(stacks / str(r)).read_text() or 'no stack written'}" for r in missing)
            raise RankError(f"ranks {missing} did not answer in time\n{told}")
        failed: list[tuple[float, int, str]] = []
        for pipe in ready:
            rank = waiting[pipe]
            try:
                failed_at, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                raise RankError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if failed_at is not None:
                failed.append((failed_at, rank, value))
            results[rank] = value
        if failed:  # a busy machine may deliver several at once
            _, rank, value = min(failed)
            raise RankError(f"rank {rank} of {len(pipes)} failed first:\n{value}")
    return [results[r] for r in range(len(pipes))]


def _main(rank: Rank, payload: bytes, send: Any, stack_file: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with open(stack_file, "w") as stack:
        faulthandler.dump_traceback_later(max(1.0, rank.timeout_s - 2.0), file=stack)
        try:
            function, args = pickle.loads(payload)
            message = pickle.dumps((None, function(rank, *args)))
        except BaseException:
            message = pickle.dumps((time.monotonic(), traceback.format_exc()))      # one clock for all processes
        faulthandler.cancel_dump_traceback_later()
        send.send_bytes(message)
        send.close()
    if dist.is_initialized():
        dist.destroy_process_group()
