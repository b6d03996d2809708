"""Predictions against the figures of the field notes, and the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.coefficients.sync import DEFAULT
from launch.fabric.choose import predict, quickest, seconds_of_choice
from launch.fabric.communicators import MOST_LINKS
from launch.fabric.estimate import KINDS
from launch.fabric.lanes import fabric_of
from launch.plan.layouts import RolloutLayout, TrainingLayout
from tests.fabric.cases import LLAMA_70B, cluster

REFERENCE = TrainingLayout(tp=8, pp=4, dp=4), RolloutLayout(tp=8, replicas=16)
WIDE = TrainingLayout(tp=4, pp=4, cp=2, dp=1)


def wire_at_46(cost) -> float:
    return cost.lower_bound_s * 50 / 46


def test_reference_case():
    """16 + 16 nodes: 145 GB out of a trainer node, 0.363 s at line rate and 0.395 s at 46 GB/s."""
    found = predict(LLAMA_70B, *REFERENCE, cluster(32))
    direct = found.routes["direct"]
    assert 8 * direct.trainer_nic_out_bytes == pytest.approx(145e9, rel=0.005)
    assert found.floor_s == pytest.approx(0.353, abs=0.001) and found.floor_by == "ingress"
    assert direct.lower_bound_s == pytest.approx(0.363, abs=0.001)
    assert wire_at_46(direct) == pytest.approx(0.395, abs=0.001)
    assert 0.36 <= direct.wire_s <= 0.45 and direct.wire_s <= 1.2 * found.floor_s
    assert 0.5 <= found.seconds <= 0.8


def test_two_engines_on_a_node():
    """TP4 x 32: 0.353 s in, and about 0.06 s over NVLink, overlapped."""
    found = predict(LLAMA_70B, TrainingLayout(tp=8, pp=4, dp=4), RolloutLayout(tp=4, replicas=32), cluster(32))
    direct = found.routes["direct"]
    assert direct.rollout_nic_in_bytes / 50e9 == pytest.approx(0.353, abs=0.001)
    assert direct.nvlink_bytes / (450e9 * DEFAULT.nvlink_efficiency) == pytest.approx(0.06, abs=0.015)
    assert direct.wire_s < 0.42


def test_engine_over_two_nodes():
    """TP16: 9.0 GB into each GPU, 0.18 s."""
    found = predict(LLAMA_70B, TrainingLayout(tp=8, pp=4, dp=4), RolloutLayout(tp=16, replicas=8), cluster(32))
    assert found.routes["direct"].rollout_nic_in_bytes == pytest.approx(9.0e9, rel=0.01)
    assert found.floor_s == pytest.approx(0.18, abs=0.005)


def test_the_exercise():
    """20 + 12 nodes: 10.6 GB out of a trainer GPU on average, 17.6 GB into a rollout GPU, 0.39 to 0.44 s."""
    training, rollout = TrainingLayout(tp=4, pp=4, cp=2, vpp=5, dp=5), RolloutLayout(tp=8, replicas=12)
    found = predict(LLAMA_70B, training, rollout, cluster(32))
    direct = found.routes["direct"]
    assert 12 * found.replica_bytes == pytest.approx(1693e9, rel=0.001)
    assert 12 * found.replica_bytes / 160 == pytest.approx(10.6e9, rel=0.005)
    assert direct.rollout_nic_in_bytes == pytest.approx(17.6e9, rel=0.005)
    assert 0.385 <= direct.wire_s <= 0.44
    assert found.gpu_order == (0, 4, 1, 5, 2, 6, 3, 7)
    assert found.cross_rail_bytes < found.natural_cross_rail_bytes / 1000
    assert "0,4,1,5,2,6,3,7" in " ".join(found.notes)


@pytest.mark.parametrize("senders, replicas, direct_s", [(16, 32, 0.73), (16, 64, 1.45)])
def test_more_rollout_than_training_nodes(senders, replicas, direct_s):
    """N_R = 2 N_T: direct 0.73 s, forwarding 0.36 s and the fill; N_R = 4 N_T: a chain of at most 0.5 s."""
    found = predict(LLAMA_70B, TrainingLayout(tp=8, pp=4, dp=4), RolloutLayout(tp=8, replicas=replicas),
                    cluster(senders + replicas))
    assert found.routes["direct"].lower_bound_s == pytest.approx(direct_s, rel=0.01)
    assert found.chosen in ("chain", "tree") and found.cost.wire_s < 0.5


def test_one_replica_sends():
    """Four nodes send to 16: 0.40 to 0.50 s by forwarding."""
    found = predict(LLAMA_70B, TrainingLayout(tp=8, pp=4), RolloutLayout(tp=8, replicas=16), cluster(20))
    assert 0.40 <= found.routes["tree"].wire_s <= 0.50
    assert found.chosen != "direct"


def test_one_gpu_sends():
    """All of it through one NIC: 141.1 GB at 46 GB/s is 3.1 s."""
    found = predict(LLAMA_70B, TrainingLayout(), RolloutLayout(tp=8, replicas=4), cluster(5))
    assert found.floor_by == "source"
    assert 2.8 <= found.routes["chain"].lower_bound_s <= found.routes["chain"].wire_s <= 3.3


@pytest.mark.parametrize("replicas", [28, 60])
def test_few_trainers_many_rollout_nodes_forward(replicas):
    """A tree is a few per cent faster than a chain, which the prediction cannot tell, and has twice the
    communicators."""
    found = predict(LLAMA_70B, WIDE, RolloutLayout(tp=8, replicas=replicas), cluster(4 + replicas))
    tree, chain, direct = (found.routes[kind] for kind in ("tree", "chain", "direct"))
    assert direct.expected_s > 4 * tree.expected_s and chain.expected_s > 1.04 * tree.expected_s
    assert found.simulate(kind="tree").total_s < found.simulate(kind="chain").total_s
    assert found.needs["tree"].total > 1.8 * found.needs["chain"].total
    assert found.chosen == "chain" and f"{found.needs['chain'].total:,} against" in found.reason


def test_with_a_narrower_range_the_faster_route_is_chosen():
    """Where the prediction can tell two routes apart, its seconds decide."""
    layouts = WIDE, RolloutLayout(tp=8, replicas=60)
    sharp = replace(DEFAULT, uncertainty=1.02)
    found = predict(LLAMA_70B, *layouts, cluster(64), sharp)
    assert found.chosen == "tree" and "chain is slower beyond the prediction's range, a factor of 1.02" in found.reason


def test_equal_routes_are_ordered_by_communicators_and_then_by_bytes_out_of_the_trainers():
    """18 + 14 nodes, the plan of configs/70b/grpo.yaml: nine senders for fourteen receivers. With a chain each receiver
    has one sender for both halves of the model behind the first hop, and nine copies leave the trainers, not 14."""
    training, rollout = TrainingLayout(tp=8, pp=2, vpp=4, dp=9), RolloutLayout(tp=4, replicas=28)
    found = predict(LLAMA_70B, training, rollout, cluster(32))
    direct, chain = found.routes["direct"], found.routes["chain"]
    assert direct.expected_s < chain.expected_s < 1.05 * direct.expected_s
    assert found.needs["chain"].total < found.needs["direct"].total < found.needs["tree"].total
    assert (direct.sent_bytes, chain.sent_bytes) == (14 * found.replica_bytes, 9 * found.replica_bytes)
    assert found.chosen == "chain"

    one_shard = predict(LLAMA_70B, TrainingLayout(dp=32), RolloutLayout(tp=8, replicas=8), cluster(12))
    assert [one_shard.needs[kind].total for kind in KINDS] == [64, 64, 128]
    assert one_shard.chosen == "chain" and "leave the training NICs" in one_shard.reason


def test_no_route_with_more_links_than_a_gpu_can_use_is_chosen():
    """Two senders for 60 receivers: a wide range would not tell `direct` from the others."""
    found = predict(LLAMA_70B, WIDE, RolloutLayout(tp=8, replicas=60), cluster(64), replace(DEFAULT, uncertainty=10.0))
    most = found.needs["direct"].busiest
    assert most > MOST_LINKS and found.usable == ("chain", "tree") and found.chosen == "chain"
    assert f"direct would have {most} communicators on a GPU, which can use 32" in found.reason
    unlimited = predict(LLAMA_70B, WIDE, RolloutLayout(tp=8, replicas=60), cluster(64), most_links=1000)
    assert unlimited.usable == KINDS


def test_no_route_can_be_opened():
    """16 stages send to every engine of TP1, whose seven neighbours on the node send and receive too."""
    training, rollout = TrainingLayout(tp=8, pp=16), RolloutLayout(tp=1, replicas=32)
    found = predict(LLAMA_70B, training, rollout, cluster(20))
    assert found.usable == () and found.needs[found.chosen].busiest == min(found.needs[kind].busiest for kind in KINDS)
    assert seconds_of_choice(LLAMA_70B, training, rollout, fabric_of(cluster(20))) is None


def test_from_one_to_seven_nodes_the_tree_hardly_grows():
    one, seven = (predict(LLAMA_70B, TrainingLayout(tp=8), RolloutLayout(tp=8, replicas=number), cluster(8))
                  for number in (1, 7))
    assert seven.routes["tree"].expected_s < 1.15 ** 3 * one.routes["tree"].expected_s
    assert seven.routes["direct"].wire_s > 6 * one.routes["direct"].wire_s


def test_a_tie_goes_to_the_simpler_route():
    found = predict(LLAMA_70B, TrainingLayout(tp=8, dp=4), RolloutLayout(tp=8, replicas=4), cluster(8))
    assert found.chosen == "direct"


def test_fp8_rollout_saves_no_bytes():
    bf16, fp8 = (predict(LLAMA_70B, *REFERENCE, cluster(32), rollout_precision=precision)
                 for precision in ("bf16", "fp8"))
    assert fp8.cost.rollout_nic_in_bytes == bf16.cost.rollout_nic_in_bytes
    assert fp8.seconds > bf16.seconds and fp8.wire_precision == "bf16" and "bf16 is sent" in fp8.notes[0]


@pytest.mark.parametrize("rollout", [REFERENCE[1], RolloutLayout(tp=4, replicas=33), RolloutLayout(tp=16, replicas=8)])
def test_a_training_gpu_digests_its_shard_as_sent_and_as_others_hold_it(rollout):
    """A quarter of the layers and the embedding are 36.3 GB on 8 GPUs, whatever the engines."""
    found = predict(LLAMA_70B, REFERENCE[0], rollout, cluster(40))
    for cost in found.routes.values():
        assert cost.trainer_digested_bytes == pytest.approx(2 * 36.3e9 / 8, rel=0.02)


def test_a_sync_waits_for_slow_digests_on_the_trainer():
    slow = replace(DEFAULT, digest_rate=5e9)
    found = predict(LLAMA_70B, *REFERENCE, cluster(32), slow)
    digests = found.cost.trainer_digested_bytes / 5e9
    after = found.cost.rollout_nic_in_bytes / 5e9 + slow.pause_s + slow.barrier_s
    assert digests > 4 * found.cost.wire_s
    assert found.seconds == pytest.approx(digests + after, rel=0.001)
    assert found.simulate(slow).total_s == pytest.approx(digests + after, rel=0.001)


def test_lora_only():
    found = predict(LLAMA_70B, *REFERENCE, cluster(32), lora_rank=16)
    assert found.cost.rollout_nic_in_bytes < 1e9 and found.seconds < 0.25
    assert "rank 16" in found.notes[0]


def test_a_pinned_route_is_kept_and_an_unknown_one_refused():
    found = predict(LLAMA_70B, *REFERENCE, cluster(32), route="chain")
    assert found.chosen == "chain" and found.reason.startswith("pinned")
    with pytest.raises(ValueError, match="direct, chain, tree"):
        predict(LLAMA_70B, *REFERENCE, cluster(32), route="star")


def test_the_search_sees_the_same():
    for training, rollout in (REFERENCE, (WIDE, RolloutLayout(tp=8, replicas=28))):
        found = predict(LLAMA_70B, training, rollout, cluster(32))
        assert seconds_of_choice(LLAMA_70B, training, rollout, fabric_of(cluster(32))) == found.seconds
        assert quickest(LLAMA_70B, training, rollout, fabric_of(cluster(32))) == min(
            cost.expected_s for cost in found.routes.values())
