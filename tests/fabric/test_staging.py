"""Buffers for buckets: who needs one of their own, and that they fit into what the planner keeps free."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from launch.coefficients.sync import DEFAULT
from launch.fabric.estimate import KINDS, MIB, RECEIVING, STAGED_BUCKETS, RouteCost
from launch.fabric.routes import build
from launch.fabric.staging import HEADER_BYTES, Staged, receiving_bytes, seats, staging
from tests.fabric.cases import Case, traffics

STREAMS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 900)), min_size=1, max_size=14).map(
    lambda drawn: [Staged(*each) for each in sorted(drawn)])


@given(STREAMS)
def test_streams_that_run_at_the_same_time_have_seats_of_their_own(streams):
    """As many seats as two consecutive slots have streams, and each stream is on one of them, after those before it."""
    found = seats(streams)
    assert sorted(number for numbers in found for number in numbers) == list(range(len(streams)))
    slots = sorted({stream.slot for stream in streams})
    place = {slot: at for at, slot in enumerate(slots)}
    for numbers in found:
        assert all(place[streams[after].slot] - place[streams[before].slot] >= 2 for before, after in pairwise(numbers))
    held = [sum(stream.slot == slot for stream in streams) for slot in slots]
    assert len(found) == max(map(sum, pairwise([*held, 0])))


def test_a_small_stream_has_a_small_buffer():
    slow, small = Staged(0, 1000), Staged(0, 10)
    assert receiving_bytes([slow, small]) == RECEIVING * (1010 + 2 * HEADER_BYTES)
    assert seats([slow, small, Staged(1, 7), Staged(2, 9), Staged(2, 990)]) == [(0, 4), (1, 3), (2,)]


@settings(max_examples=60, deadline=None)
@given(case=traffics(), kind=st.sampled_from(KINDS), bucket=st.sampled_from([MIB, 64 * MIB]))
def test_the_buffers_of_every_route_fit_into_what_the_planner_keeps_free(case: Case, kind, bucket):
    cost = RouteCost(kind, case.traffic, case.traffic.fabric, DEFAULT, bucket)
    found = staging(build(case.traffic, kind, cost.chunk_bytes))
    assert found.training <= 2 * (bucket + HEADER_BYTES)
    headers = RECEIVING * HEADER_BYTES * 64
    assert found.rollout <= STAGED_BUCKETS * bucket + headers, cost.staged
