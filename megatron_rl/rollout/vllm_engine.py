"""A wrapper of vLLM's AsyncLLM in which every waiting call raises when vLLM's processes end.

AsyncLLM itself fails requests when the engine core dies, but its other calls (worker RPCs, pause, resume) then wait for
an answer forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

from megatron_rl.weight_sync.ends.vllm_internals import OutputCounter, output_handler, pause_scheduler, shut_down

Answer = TypeVar("Answer")


class EngineDied(RuntimeError):
    """vLLM's engine core or a worker ended or did not start. The message contains the end of its log."""


class VllmEngine:
    """A started AsyncLLM.

    Args:
        arguments: arguments of vLLM's `AsyncEngineArgs`.
        name: name of the engine in messages.
        log_path: log file of the engine core and the workers, or None to use this process's output.

    Raises:
        EngineDied: the engine did not start.
    """

    def __init__(self, arguments: dict, name: str, log_path: Path | None) -> None:
        from vllm import __version__
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._name, self._log_path, self.version = name, log_path, __version__
        engine_arguments = AsyncEngineArgs(**arguments)
        try:
            with _output_to(log_path):
                self._llm = AsyncLLM.from_engine_args(engine_arguments)
        except RuntimeError as error:
            raise EngineDied(f"{name} did not start: {error}{self._log_tail()}") from error
        self._outputs = OutputCounter(self._llm)

    @property
    def unfinished(self) -> int:
        """Number of unfinished sequences in vLLM."""
        return self._llm.get_num_unfinished_requests()

    @property
    def generated_tokens(self) -> int:
        """Number of tokens sampled since the engine core started, including those of unfinished requests."""
        return self._outputs.tokens

    async def sequence_ended(self) -> None:
        """Wait until the next sequence ends."""
        await self._call(self._outputs.ended.wait())

    def check_alive(self) -> None:
        """Raise EngineDied if vLLM's processes have ended."""
        if output_handler(self._llm).done():
            raise self._died()

    async def enqueue(self, request_id: str, token_ids: list[int], parameters, cache_salt: str):
        """Submit a request to the engine. It shares cached blocks only with requests of the same `cache_salt`. Returns
        the queue for `finished`."""
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(token_ids, cache_salt=cache_salt)
        return await self._call(self._llm.add_request(request_id, prompt, parameters))

    async def finished(self, queue):
        """Await the final `RequestOutput`. Cancelling this call aborts the request."""
        try:
            while True:
                output = queue.get_nowait() or await self._call(queue.get())
                if output.finished:
                    return output
        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise

    async def rpc(self, method: str, *args) -> list:
        """Call a method of every worker. Returns the answers by TP rank."""
        return await self._call(self._llm.collective_rpc(method, args=args))

    async def freeze(self, *, clear_cache: bool) -> None:
        """Schedule nothing until `resume`. Running requests keep their place, and new ones wait."""
        await self._call(pause_scheduler(self._llm, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._call(self._llm.resume_generation())

    async def abort_all(self) -> None:
        """Abort all requests. Each returns its tokens so far, with finish reason `abort`."""
        await self._call(self._llm.pause_generation(mode="abort"))
        await self.resume()

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Drop all cached blocks. Returns False if requests hold blocks and must not be preempted."""
        return await self._call(self._llm.reset_prefix_cache(reset_running_requests=preempt))

    async def open_transfer(self, init_info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._call(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    async def update(self, update_info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    async def label_version(self, version: str) -> None:
        """Label all tokens sampled from now on with this weight version."""
        await self._call(self._llm.update_weight_version(version))

    async def stop(self, timeout_s: float) -> None:
        """End the engine core and its workers."""
        output_handler(self._llm).cancel()     # otherwise it reports the end of the engine core as a failure
        await asyncio.to_thread(shut_down, self._llm, timeout_s)

    async def _call(self, call: Awaitable[Answer]) -> Answer:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, output_handler(self._llm)}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            raise self._died()
        try:
            return task.result()
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._died() from error

    def _died(self) -> EngineDied:
        return EngineDied(f"{self._name} died{self._log_tail()}")

    def _log_tail(self, lines: int = 30) -> str:
        if self._log_path is None or not self._log_path.exists():
            return ""
        tail = self._log_path.read_text(errors="replace").splitlines()[-lines:]
        return f"; the end of {self._log_path}:\n" + "\n".join(tail)


@contextlib.contextmanager
def _output_to(path: Path | None) -> Iterator[None]:
    """Redirect stdout and stderr to `path`, so that processes started inside inherit it as their output."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
