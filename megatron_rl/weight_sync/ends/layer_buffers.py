"""The buffers through which a worker's quantised layers arrive, while their streams run.

Streams write the bytes of a layer into its buffer (`plan.layers`). When the last byte is written and digested, the
worker's main thread quantises the layer into the live tensors and gives the buffer to the next layer. What arrives
meanwhile waits in the staging of its stream, so nothing on the wire waits.

vLLM reduces the scales of layers that are cut along the input over the TP ranks. Such a reduction has no deadline, so a
rank must not begin one that another rank never joins. Before each batch of layers, the ranks therefore agree on how
many all of them have received, or that one has failed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod

import torch

from megatron_rl.weight_sync.plan.layers import LayerPlan, layer_of
from megatron_rl.weight_sync.wire.transport import Deadline, TransportError

FAILED = -1
LOOK_EVERY_S = 0.05
"""Interval at which the main thread looks whether the lanes were closed while every stream waits for a buffer."""
ALIGN = 256
"""Offset of a parameter in a buffer: a multiple of this many bytes, as torch's allocator gives."""


class LayerBuffers:
    """The buffers of one worker. The first of them exists from the start, before vLLM measures the memory for its KV
    cache.

    Args:
        forms: the parameters of quantised layers as vLLM loads them, by name, on the meta device.
        device: of the buffers.
        quantise: builds a layer's live tensors from the values of its parameters (by name).
        agree: the least of the values that the TP ranks of the engine give. All of them must call it.
    """

    def __init__(self, forms: Mapping[str, torch.Tensor], device: torch.device,
                 quantise: Callable[[str, Mapping[str, torch.Tensor]], None], agree: Callable[[int], int]) -> None:
        self._forms: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, form in forms.items():
            self._forms[layer_of(name)][name] = form
        self._device, self._quantise, self._agree = device, quantise, agree
        self._plan = LayerPlan((), ())
        self._views: dict[str, dict[str, torch.Tensor]] = {}
        self._buffers: list[torch.Tensor] = []
        self._allocate(1)
        self._changed = threading.Condition()
        self._before: dict[str, str | None] = {}
        """Layer -> the one that has its buffer before."""
        self._left: dict[str, int] = {}
        """Layer -> bytes that are not written yet."""
        self._quantised: set[str] = set()
        self._failed = True
        self._writes: dict[str, list[torch.cuda.Event]] = {}
        self._free: dict[str, torch.cuda.Event] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters that arrive through the buffers."""
        return frozenset(name for forms in self._forms.values() for name in forms)

    @property
    def layers(self) -> tuple[str, ...]:
        """In the model's order."""
        return tuple(self._forms)

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def scratch(self, layer: str) -> dict[str, torch.Tensor]:
        """The parameters of a layer in the first buffer, for use between two syncs."""
        return self._view(layer, self._buffers[0])

    def open(self, plan: LayerPlan) -> None:
        """Get ready for syncs with this plan."""
        missing = self._forms.keys() - set(plan.order)
        if missing or len(plan.order) != len(self._forms):
            raise ValueError(f"no plan for the quantised layers {', '.join(sorted(missing)[:4]) or plan.order[:4]}")
        self._plan = plan
        self._allocate(plan.count)
        self._views = {layer: self._view(layer, self._buffers[number])
                       for layer, number in zip(plan.order, plan.buffers, strict=True)}
        last: dict[int, str] = {}
        for layer, number in zip(plan.order, plan.buffers, strict=True):
            self._before[layer] = last.get(number)
            last[number] = layer

    def begin(self) -> None:
        """Start a sync: nothing is written."""
        with self._changed:
            self._left = {layer: sum(map(_bytes, forms.values())) for layer, forms in self._forms.items()}
            self._quantised, self._failed = set(), False
            self._writes, self._free = defaultdict(list), {}

    def take(self, layer: str, deadline: Deadline) -> Mapping[str, torch.Tensor]:
        """The parameters of a layer in its buffer, for one stream to write. Returns once the layer before is quantised.

        Raises:
            TransportError: the sync failed meanwhile, or the deadline has passed.
        """
        before = self._before[layer]
        with self._changed:
            free = self._changed.wait_for(lambda: self._failed or before is None or before in self._quantised,
                                          deadline.remaining())
            if self._failed or not free:
                raise TransportError(f"the buffer of {layer} did not become free: " + (
                    "the transfer failed" if self._failed else f"{before} is not complete"))
            if before in self._free:
                torch.cuda.current_stream(self._device).wait_event(self._free[before])
        return self._views[layer]

    def written(self, layer: str, nbytes: int) -> None:
        """One stream has written and digested `nbytes` of a layer."""
        with self._changed:
            if self._device.type == "cuda":
                self._writes[layer].append(torch.cuda.current_stream(self._device).record_event())
            self._left[layer] -= nbytes
            if not self._left[layer]:
                self._changed.notify_all()

    def fail(self) -> None:
        """The transfer failed: nothing more is complete, and nobody waits for a buffer."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def quantise_all(self, deadline: Deadline, closed: Callable[[], bool], leave: Callable[[Exception], None]) -> None:
        """Quantise every layer once it has arrived on all TP ranks. All of them call it, in the worker's main thread.
        If the transfer fails on any of them, some layers are new and some old afterwards.

        Args:
            closed: whether the lanes were closed.
            leave: called with each failure.
        """
        order, done = self._plan.order, 0
        while done < len(order):
            agreed = self._agree(self._arrived(done, deadline, closed))
            if agreed == FAILED:
                self.fail()
                leave(TransportError("the transfer failed on a worker of its engine"))
                return
            for layer in order[done:agreed]:        # all that were agreed on, because others wait in a reduction
                try:
                    self._quantise_one(layer)
                except Exception as error:
                    self.fail()
                    leave(error)
            done = agreed
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def give_up(self) -> None:
        """This worker does not take part in a sync: the others learn it where they would wait for it."""
        if self._plan.order:
            self._agree(FAILED)

    def _arrived(self, done: int, deadline: Deadline, closed: Callable[[], bool]) -> int:
        """The number of layers that have arrived without a gap, more than `done`; FAILED if there will be no more."""
        order = self._plan.order
        with self._changed:
            while self._left[order[done]] and not self._failed and deadline.remaining() and not closed():
                self._changed.wait(min(LOOK_EVERY_S, deadline.remaining()))
            if self._left[order[done]] or self._failed:
                self._failed = True
                self._changed.notify_all()
                return FAILED
            return next((number for number in range(done, len(order)) if self._left[order[number]]), len(order))

    def _quantise_one(self, layer: str) -> None:
        for event in self._writes[layer]:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._quantise(layer, self._views[layer])
        with self._changed:
            if self._device.type == "cuda":
                self._free[layer] = torch.cuda.current_stream(self._device).record_event()
            self._quantised.add(layer)
            self._changed.notify_all()

    def _allocate(self, count: int) -> None:
        size = max((sum(_room(form) for form in forms.values()) for forms in self._forms.values()), default=0)
        if len(self._buffers) > count:
            del self._buffers[count:]
        while size and len(self._buffers) < count:
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))

    def _view(self, layer: str, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        views, at = {}, 0
        for name, form in self._forms[layer].items():
            views[name] = buffer[at:at + _bytes(form)].view(form.dtype).view(form.shape)
            at += _room(form)
        return views


def _bytes(form: torch.Tensor) -> int:
    return prod(form.shape) * form.element_size()


def _room(form: torch.Tensor) -> int:
    return -(-_bytes(form) // ALIGN) * ALIGN
