"""Rounds of opening: proper, and as few as Vizing's theorem promises."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from launch.fabric.rounds import rounds

pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]))


def assert_proper(graph: list[tuple], found: dict) -> int:
    """No member opens two in a round; returns the number of rounds."""
    edges = {frozenset(pair) for pair in graph}
    assert found.keys() == edges
    for member in {member for pair in edges for member in pair}:
        mine = [colour for pair, colour in found.items() if member in pair]
        assert len(mine) == len(set(mine))
    most = max(Counter(member for pair in edges for member in pair).values(), default=0)
    assert all(0 <= colour <= most for colour in found.values())
    return len(set(found.values()))


@given(pairs)
def test_a_member_opens_one_in_a_round_and_there_is_one_round_more_than_its_pairs_at_most(graph):
    assert_proper(graph, rounds(graph))


def test_sources_and_receivers_that_all_meet():
    """Nine by fourteen took 131 turns one after the other; fourteen are the least."""
    graph = [(f"source {s}", f"receiver {r}") for s, r in itertools.product(range(9), range(14))]
    assert assert_proper(graph, rounds(graph)) in (14, 15)
