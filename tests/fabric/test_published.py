"""Published transfers: bounds below all of them, classes, robustness."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.accuracy import weight_sync
from launch.accuracy.points import Point, load
from launch.coefficients.sync import PublishedSyncCoefficients

MEASURED = Path(__file__).parents[2] / "benchmarks" / "measured"


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return [point for point in load(MEASURED) if point.kind == "weight_sync"]


def test_the_lower_bound_is_below_every_measurement(points):
    for point in points:
        bound = weight_sync.lower_bound_s(point, weight_sync.default())
        for each in weight_sync.predict(point, weight_sync.default()):
            assert bound is not None and 0 < bound < each.measured_low, point.id


def test_expected_is_within_twice_of_every_measurement(points):
    for point in points:
        for each in weight_sync.predict(point, weight_sync.default()):
            assert each.measured_low / 2 < each.predicted < each.measured_high * 2, point.id


def test_shipped_coefficients_are_the_calibration(points):
    assert weight_sync.calibrate(points, weight_sync.default()) == weight_sync.default()
    start = PublishedSyncCoefficients(**{field.name: getattr(weight_sync.default(), field.name) * 1.5
                                         for field in fields(PublishedSyncCoefficients)
                                         if field.name != "nic_efficiency"})
    again = weight_sync.calibrate(points, start)
    for point in points:
        (mine,), (theirs,) = (weight_sync.predict(point, each) for each in (weight_sync.default(), again))
        assert theirs.predicted == pytest.approx(mine.predicted, rel=0.15), point.id


def _point(**data) -> Point:
    return Point(id="x", kind="weight_sync", regime=data.pop("regime", "?"), source="?", confidence="read",
                 data={"measured": {"sync_time_s": 3.0}, **data}, model=None, model_name="?")


@pytest.mark.parametrize("regime, transport, kind", [
    ("broadcast_disaggregated", "NCCL broadcast of full weights", "gather_broadcast"),
    ("broadcast_disaggregated", "NCCL broadcast", "bucket_broadcast"),
    ("reshard_disaggregated", "NCCL point-to-point reshard", "reshard"), ("other", "RDMA writes", "reshard"),
    ("nccl_anchor_disaggregated", "NCCL (path not named)", "reshard"),
    ("checkpoint_engine", "NCCL", "bucket_broadcast"), ("checkpoint_engine", "NIXL GPU RDMA", "bucket_broadcast"),
    ("anything", "host-memory checkpoint, broadcast in buckets", "host_checkpoint"),
    ("anything", "NCCL", "bucket_broadcast"),
    ("colocated", "in-place handover", "handover"), ("x", "delta over an object store", "delta"),
    ("x", "NCCL send/recv plan", "send_plan"), ("x", "per-tensor broadcast", "gather_broadcast"),
    ("never seen", None, "bucket_broadcast")])
def test_engine_classes(regime, transport, kind):
    assert weight_sync.engine_class(_point(regime=regime, transport=transport)) == kind
    assert weight_sync.engine_class(_point(regime="sparse", transport=transport, changed_fraction=0.02)) == "delta"


def test_payload_alone_is_enough():
    point = _point(payload_bytes=141e9, hardware=None)
    assert weight_sync.lower_bound_s(point, weight_sync.default()) == pytest.approx(141e9 / 8 / 50e9)
    assert weight_sync.predict(point, weight_sync.default())[0].predicted > 0


def test_without_a_payload_the_reason_is_given():
    (found,) = weight_sync.predict(_point(), weight_sync.default())
    assert found.predicted is None and found.reason
    assert weight_sync.lower_bound_s(_point(), weight_sync.default()) is None


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(("payload_bytes", "precision", "transport", "train_parallelism", "hardware",
                                        "rollout_parallelism", "changed_fraction", "measured")),
                       st.one_of(st.none(), st.just("not_stated"), st.integers(-1, 10**13), st.just("8x400Gbit"),
                                 st.dictionaries(st.sampled_from(("tp", "pp", "ep", "nic", "gpu", "sync_time_s",
                                                                  "num_gpus_train", "num_gpus_rollout",
                                                                  "gpus_per_node")),
                                                 st.one_of(st.none(), st.integers(-1, 64), st.just("0x0Gbit"))))))
def test_odd_points_never_raise(data):
    point = Point(id="x", kind="weight_sync", regime="?", source="?", confidence="read", data=data, model=None,
                  model_name="?", model_problem="not described")
    weight_sync.predict(point, weight_sync.default())
    weight_sync.lower_bound_s(point, weight_sync.default())
