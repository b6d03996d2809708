"""Response lengths: a worked table, numerical integration, enumeration, and what the tail must and must not do."""

from __future__ import annotations

import json
import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from launch.planner.workload.lengths import Counted, LogNormal

TABLE = [   # sigma, p50, p99, capped, E[l^2]/E[l], active context, E[max of 16], P(a group of 16 holds a capped one)
    (0.6, 1717, 6948, 0.005, 2874, 1949, 5107, 0.07),
    (0.9, 1438, 8192, 0.027, 3690, 2357, 6449, 0.35),
    (1.1, 1265, 8192, 0.045, 4178, 2601, 6973, 0.52)]

shapes = st.tuples(st.floats(300, 4000), st.floats(0.1, 2.0), st.integers(5000, 40000))


@pytest.mark.parametrize("row", TABLE)
def test_worked_table(row):
    sigma, p50, p99, capped, biased, context, longest, group = row
    lengths = LogNormal(mean=2048, sigma=sigma, cap=8192)
    assert lengths.quantile(0.5) == pytest.approx(p50, rel=2e-3)
    assert lengths.quantile(0.99) == pytest.approx(p99, rel=2e-3)
    assert lengths.capped_share == pytest.approx(capped, abs=5e-4)
    assert lengths.second_moment / lengths.mean == pytest.approx(biased, rel=1e-3)
    assert lengths.active_context(512) == pytest.approx(context, abs=1)
    assert lengths.expected_max(16) == pytest.approx(longest, rel=1e-3)
    assert lengths.group_capped(16) == pytest.approx(group, abs=0.005)


@settings(max_examples=15, deadline=None)
@given(shapes)
def test_moments_are_those_of_the_survival_function(shape):
    """E[l] is the integral of S, E[l^2] of 2 l S: by the midpoint rule, which knows nothing of the closed forms."""
    lengths = LogNormal(*shape)
    width = lengths.cap / 4000
    at = [(i + 0.5) * width for i in range(4000)]
    survival = [lengths.survival(each) for each in at]
    assert sum(survival) * width == pytest.approx(lengths.mean, rel=0.01)
    second = sum(2 * x * s for x, s in zip(at, survival, strict=True)) * width
    assert second == pytest.approx(lengths.second_moment, rel=0.01)


@settings(max_examples=15, deadline=None)
@given(shapes)
def test_profile_integrates_to_the_means(shape):
    """Tokens generated, and tokens left to the active ones in steady state, come out of the profile as they must."""
    lengths = LogNormal(*shape)
    assert sum((b - a) * s for a, b, s, _ in lengths.profile) == pytest.approx(lengths.mean, rel=1e-9)
    assert sum((b - a) * r for a, b, _, r in lengths.profile) == pytest.approx(lengths.mean_residual, rel=0.015)
    assert lengths.profile[0][0] == 0 and lengths.profile[-1][1] == lengths.cap
    assert len(lengths.profile) <= 40


@settings(max_examples=40, deadline=None)
@given(shapes, st.floats(1.05, 2.0), st.integers(2, 4096))
def test_a_longer_tail_at_the_same_mean(shape, factor, count):
    """Never lowers what the tail decides; never changes the number of tokens."""
    mean, sigma, cap = shape
    short, long = LogNormal(mean, sigma, cap), LogNormal(mean, sigma * factor, cap)
    assert long.mean == short.mean
    assert long.expected_max(count) >= short.expected_max(count) * (1 - 1e-9)
    assert long.second_moment >= short.second_moment * (1 - 1e-9)
    assert long.active_context(100) >= short.active_context(100) * (1 - 1e-9)
    assert long.attention_length(100) >= short.attention_length(100) * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(shapes)
def test_order_statistics_are_ordered(shape):
    lengths = LogNormal(*shape)
    found = [lengths.expected_max(count) for count in (1, 2, 8, 64, 4096)]
    assert found == sorted(found) and found[-1] <= lengths.cap
    assert found[0] == pytest.approx(lengths.mean, rel=1e-6)
    quantiles = [lengths.quantile(i / 10) for i in range(11)]
    assert quantiles == sorted(quantiles)


def test_counted_lengths_by_enumeration():
    """All 3^3 outcomes of three responses."""
    lengths = Counted.of({10: 1, 40: 2, 100: 1})
    chances = {10: 0.25, 40: 0.5, 100: 0.25}
    longest = sum(chances[a] * chances[b] * chances[c] * max(a, b, c) for a, b, c in product(chances, repeat=3))
    assert lengths.mean == pytest.approx(47.5)
    assert lengths.second_moment == pytest.approx(0.25 * 100 + 0.5 * 1600 + 0.25 * 10000)
    assert lengths.expected_max(3) == pytest.approx(longest)
    assert [lengths.quantile(q) for q in (0, 0.25, 0.26, 0.75, 0.76, 1)] == [10, 10, 40, 40, 100, 100]
    assert [lengths.survival(x) for x in (0, 9, 10, 39, 40, 99, 100)] == [1, 1, 0.75, 0.75, 0.25, 0.25, 0]
    assert lengths.capped_share == 0.25
    # of the tokens of a long run, those at position 50 or later of their response: 0.25 x 50 of 47.5
    assert lengths.residual_survival(50) == pytest.approx(0.25 * 50 / 47.5)
    # sequences of 5 + l tokens
    squares = sum(share * (5 + length) ** 2 for length, share in chances.items())
    assert lengths.attention_length(5) == pytest.approx(squares / 52.5)


def test_counted_and_log_normal_agree():
    """The log-normal, drawn at 5,000 even quantiles."""
    smooth = LogNormal(1000, 0.8, 6000)
    drawn: dict[int, float] = {}
    for i in range(5000):
        length = round(smooth.quantile((i + 0.5) / 5000))
        drawn[length] = drawn.get(length, 0) + 1
    counted = Counted.of(drawn, cap=6000)
    for count in (1, 16, 256):
        assert counted.expected_max(count) == pytest.approx(smooth.expected_max(count), rel=5e-3)
    assert counted.second_moment == pytest.approx(smooth.second_moment, rel=5e-3)
    assert counted.capped_share == pytest.approx(smooth.capped_share, abs=2e-4)
    for length in (200, 1000, 3000):
        assert counted.residual_survival(length) == pytest.approx(smooth.residual_survival(length), abs=2e-3)


def test_a_cap_cuts_counted_lengths():
    lengths = Counted.of({100: 1, 300: 1, 900: 2}, cap=400)
    assert lengths.counts == ((100, 0.25), (300, 0.25), (400, 0.5)) and lengths.capped_share == 0.5
    roomy = Counted.of({100: 1}, cap=400)
    assert roomy.cap == 400 and roomy.capped_share == 0 and roomy.expected_max(64) == 100
    fixed = Counted.fixed(64)
    assert (fixed.mean, fixed.mean_residual, fixed.expected_max(9), fixed.capped_share) == (64, 32, 64, 1)


@pytest.mark.parametrize("record, length", [
    ({"tokens": 12, "completion": "..."}, 12), ({"response_length": 7, "tokens": 99}, 7),
    ({"token_ids": [1, 2, 3]}, 3), ({"length": 5}, 5), ({"completion_tokens": 44}, 44)])
def test_fields_of_a_file(tmp_path, record, length):
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(record) + "\n\n" + json.dumps(record) + "\n")
    assert Counted.from_file(path).counts == ((length, 1.0),)


@pytest.mark.parametrize("text, message", [
    ("", "no completion"), ("{}\n", ":1"), ('{"tokens": 3}\n[]\n', ":2"), ('{"tokens": 3}\n{"tokens": 0}\n', ":2"),
    ('{"tokens": "x"}\n', "not a response length"), ('{"tokens": true}\n', "not a response length"),
    ('{"tokens": 1.5}\n', "not a response length"), ('{"tokens": []}\n', "not a response length"),
    ("{tokens", "not JSON"), ('{"tokens": 99999999999}\n', "not a response length"), ("[" * 100_000, "not JSON")])
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Counted.from_file(path)
    assert message in str(caught.value) and "bad.jsonl" in str(caught.value) and caught.value.fix


def test_unreadable_files(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"tokens": "\xff"}')
    for name in ("missing.jsonl", "latin.jsonl", "."):
        with pytest.raises(UserError, match="cannot read"):
            Counted.from_file(tmp_path / name)


@pytest.mark.parametrize("make", [
    lambda: LogNormal(0, 0.9, 100), lambda: LogNormal(-1, 0.9, 100), lambda: LogNormal(math.nan, 0.9, 100),
    lambda: LogNormal(math.inf, 0.9, 100), lambda: LogNormal(100, 0.9, 100), lambda: LogNormal(101, 0.9, 100),
    lambda: LogNormal(99.99, 0.9, 100), lambda: LogNormal(10, 0, 100), lambda: LogNormal(10, 6, 100),
    lambda: LogNormal(0.5, 0.9, 100),
    lambda: LogNormal(10, math.nan, 100), lambda: LogNormal(10, 0.9, 0), lambda: LogNormal(10, 0.9, 10**9),
    lambda: Counted.of({}), lambda: Counted.of({0: 1}), lambda: Counted.of({10: -1}), lambda: Counted.of({10: 0}),
    lambda: Counted.of({10: math.inf}), lambda: Counted.of({10: math.nan}), lambda: Counted.of({10.5: 1}),
    lambda: Counted.of({10: 1}, cap=0)])
def test_impossible_lengths(make):
    with pytest.raises(UserError) as caught:
        make()
    assert caught.value.fix


@settings(max_examples=60, deadline=None)
@given(st.floats(allow_nan=True), st.floats(allow_nan=True), st.integers(-10, 10**8))
def test_any_numbers_give_a_distribution_or_a_message(mean, sigma, cap):
    try:
        lengths = LogNormal(mean, sigma, cap)
    except UserError:
        return
    assert lengths.profile and 0 <= lengths.capped_share <= 1
    assert lengths.mean * (1 - 1e-6) <= lengths.expected_max(64) <= lengths.cap
