"""`LayerBuffers` by itself: TP ranks that quantise together, and one that fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_rl.weight_sync.ends.layer_buffers import LayerBuffers
from megatron_rl.weight_sync.plan.layers import LayerPlan
from megatron_rl.weight_sync.wire.transport import Deadline, TransportError
from tests.patience import patient

LAYERS = ("a", "b", "c", "d")
NBYTES = 8 * 2
PLAN = LayerPlan(LAYERS, (0, 1, 0, 1))


class Ranks:
    """TP ranks of an engine, a thread each; `reduced` is what they would reduce over each other."""

    def __init__(self, count: int, breaks: tuple[int, str] | None = None) -> None:
        self._barrier = threading.Barrier(count, timeout=patient(10))
        self._given = [0] * count
        self._breaks = breaks
        self.reduced: list[list[str]] = [[] for _ in range(count)]
        self.failures: list[list[Exception]] = [[] for _ in range(count)]
        forms = {f"{layer}.weight": torch.empty(2, 4, dtype=torch.bfloat16, device="meta") for layer in LAYERS}
        self.buffers = [LayerBuffers(forms, torch.device("cpu"), self._quantise(rank), self._agree(rank))
                        for rank in range(count)]
        for each in self.buffers:
            each.open(PLAN)
            each.begin()

    def _agree(self, rank: int):
        def agree(value: int) -> int:
            self._given[rank] = value
            self._barrier.wait()
            least = min(self._given)
            self._barrier.wait()
            return least
        return agree

    def _quantise(self, rank: int):
        def quantise(layer: str, values) -> None:
            if self._breaks == (rank, layer):
                raise ZeroDivisionError
            assert values[f"{layer}.weight"].eq(LAYERS.index(layer)).all()
            self.reduced[rank].append(layer)
        return quantise

    def run(self, deadline_s: float, writes: list[tuple[str, ...]]) -> None:
        """Every rank quantises, while a stream writes these layers of it; one that is out of layers fails."""
        def stream(rank: int) -> None:
            buffers = self.buffers[rank]
            try:
                for layer in writes[rank]:
                    buffers.take(layer, Deadline(deadline_s))[f"{layer}.weight"].fill_(LAYERS.index(layer))
                    buffers.written(layer, NBYTES // 2)
                    buffers.written(layer, NBYTES // 2)
                if set(writes[rank]) != set(LAYERS):
                    buffers.fail()
            except TransportError as error:
                self.failures[rank].append(error)

        with ThreadPoolExecutor(2 * len(writes)) as pool:
            list(pool.map(lambda call: call(), [
                *(lambda rank=rank: stream(rank) for rank in range(len(writes))),
                *(lambda rank=rank: self.buffers[rank].quantise_all(
                    Deadline(deadline_s), lambda: False, self.failures[rank].append) for rank in range(len(writes)))]))


def test_layers_share_buffers_and_all_ranks_quantise_them_in_one_order():
    ranks = Ranks(3)
    ranks.run(patient(10), [LAYERS, ("b", "a", "c", "d"), LAYERS])
    assert ranks.reduced == [list(LAYERS)] * 3 and ranks.failures == [[], [], []]
    assert {each.nbytes for each in ranks.buffers} == {2 * 256}


@pytest.mark.parametrize("written", [(), LAYERS[:2]])
def test_no_rank_begins_a_reduction_that_another_never_joins(written):
    """One rank's transfer fails: the others have layers that it lacks, and leave them. The next sync is whole."""
    ranks = Ranks(2)
    ranks.run(patient(10), [LAYERS, written])
    begun = list(ranks.reduced[0])
    assert ranks.reduced[1] == begun == list(written)[:len(begun)]
    assert all(each and all("failed" in str(error) for error in each) for each in ranks.failures)
    for each in ranks.buffers:
        each.begin()
    ranks.run(patient(10), [LAYERS, LAYERS])
    assert ranks.reduced == [[*begun, *LAYERS]] * 2


def test_a_layer_that_fails_does_not_leave_the_others_waiting():
    ranks = Ranks(2, breaks=(1, "b"))
    ranks.run(patient(10), [LAYERS, LAYERS])
    assert any(isinstance(error, ZeroDivisionError) for error in ranks.failures[1])
    assert ranks.failures[0] and ranks.reduced[1] == [each for each in ranks.reduced[0] if each != "b"]


def test_a_rank_whose_lanes_are_closed_tells_the_others():
    ranks = Ranks(2)
    with ThreadPoolExecutor(2) as pool:
        giving_up = pool.submit(ranks.buffers[0].give_up)
        pool.submit(ranks.buffers[1].quantise_all, Deadline(0.1), lambda: True, ranks.failures[1].append).result()
        giving_up.result()
    assert ranks.failures[1] and ranks.reduced == [[], []]


def test_a_buffer_that_does_not_become_free_is_an_error():
    (buffers,) = Ranks(1).buffers
    buffers.take("a", Deadline(0.0))
    with pytest.raises(TransportError, match="buffer of c did not become free: a is not complete"):
        buffers.take("c", Deadline(0.01))
    with pytest.raises(ValueError, match="no plan for the quantised layers d"):
        buffers.open(LayerPlan(LAYERS[:3], (0, 0, 0)))
