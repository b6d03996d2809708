"""Models, layouts and fabrics of these tests."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from hypothesis import strategies as st

from launch.cluster.spec import ClusterSpec, Gpu
from launch.fabric.lanes import Fabric, Traffic, engine_gpus, holders, traffic
from launch.fabric.routes import ROOT, Route
from launch.fabric.shards import Worker, flows
from launch.model.architecture import Architecture
from launch.plan.layouts import RolloutLayout, TrainingLayout

LLAMA_70B = Architecture(80, 8192, 28672, 64, 8, 128, 128256, tied=False)
SMALL = Architecture(layers=8, hidden=48, ffn=176, heads=16, kv_heads=4, head_dim=8, vocab=1001, tied=False,
                   qkv_bias=True)
TIED = Architecture(layers=9, hidden=48, ffn=130, heads=16, kv_heads=8, head_dim=8, vocab=997, tied=True,
                  qk_norm=True)
MIXTURE = Architecture(layers=8, hidden=48, ffn=0, heads=16, kv_heads=2, head_dim=8, vocab=1024, tied=False,
                     experts=16, experts_per_token=2, moe_ffn=40, shared_ffn=64)
GPT = Architecture(layers=8, hidden=48, ffn=192, heads=16, kv_heads=16, head_dim=8, vocab=513, tied=True,
                 mlp_matrices=2, all_biases=True, learned_positions=77)
WHOLE_NORMS = Architecture(layers=8, hidden=48, ffn=176, heads=16, kv_heads=8, head_dim=8, vocab=1001,
                         tied=False, qk_norm=True, qk_norm_whole=True, post_norm=True)
SHAPES = (SMALL, TIED, MIXTURE, GPT, WHOLE_NORMS)

H100 = Gpu("H100", bf16_flops=989.4e12, fp8_flops=1978.9e12, fp32_flops=66.9e12, hbm_bytes=80 * 10**9,
           usable_bytes=84 * 10**9, hbm_bandwidth=3.35e12, nvlink_bandwidth=450e9, power_w=700, source="test")
FABRIC = Fabric(gpus_per_node=8, nics_per_node=8, nic_bandwidth=50e9, nvlink_bandwidth=450e9, rails=8)


def cluster(nodes: int) -> ClusterSpec:
    return ClusterSpec("test", tuple(f"node{number}" for number in range(nodes)), 8, H100, 8, 50e9, 8, 2 * 10**12)


class Case(NamedTuple):
    traffic: Traffic
    workers: dict
    """Engine GPU -> worker."""
    wanted: dict
    """(shard, worker) -> bytes."""


@st.composite
def traffics(draw: st.DrawFn, rollout_tp: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Case:
    """Random small cases."""
    shape = draw(st.sampled_from(SHAPES))
    cp, dp = draw(st.sampled_from((1, 2))), draw(st.integers(1, 5))
    ep = draw(st.sampled_from([each for each in (1, 2, 4) if cp * dp % each == 0])) if shape.experts else 1
    etp = draw(st.sampled_from((1, 2))) if shape.experts and cp * dp // ep % 2 == 0 else 1
    training = TrainingLayout(tp=draw(st.sampled_from((1, 2, 4, 8))), pp=draw(st.sampled_from((1, 2, 4))), cp=cp,
                              dp=dp, ep=ep, etp=etp)
    rollout = RolloutLayout(tp=draw(st.sampled_from(rollout_tp)), pp=draw(st.sampled_from((1, 1, 2))),
                            replicas=draw(st.integers(1, 12)))
    rails = draw(st.sampled_from((8, 8, 1)))
    fabric = Fabric(8, draw(st.sampled_from((8, 4))) if rails == 8 else 8, 50e9, 450e9, rails,
                    tuple(number // 3 for number in range(60)) if draw(st.booleans()) else ())
    if fabric.nics_per_node == 4:
        fabric = Fabric(8, 4, 50e9, 450e9, 4, fabric.leaf_of_node)
    lora_rank = draw(st.sampled_from((0, 0, 0, 8)))
    moved = traffic(shape, training, rollout, fabric, lora_rank=lora_rank)
    return Case(moved, workers_of(moved, rollout), wanted_of(shape, training, rollout, lora_rank))


def workers_of(moved: Traffic, rollout: RolloutLayout) -> dict:
    first = -(-moved.training.gpus // moved.fabric.gpus_per_node)
    found = {}
    for replica in range(rollout.replicas):
        places = engine_gpus(rollout.tp, rollout.pp, replica, moved.order, moved.fabric.gpus_per_node)
        for rank, place in enumerate(places):
            place = place._replace(node=place.node + first)
            assert place not in found, "two engine ranks on one GPU"
            found[place] = Worker(*divmod(rank, rollout.tp))
    return found


def check_coverage(route: Route, case: Case) -> None:
    """Every GPU receives every byte of its worker exactly once, from a member that holds it."""
    moved, workers, wanted = case
    got: dict = defaultdict(list)
    for edge in route.edges:
        assert workers[edge.destination] == edge.worker and edge.bytes > 0
        got[edge.destination, edge.shard].append((edge.first_byte, edge.first_byte + edge.bytes))
        if edge.parent == ROOT:
            assert edge.via == "nic" and edge.hop == 1
            assert edge.source in holders(moved.training, edge.shard, moved.fabric.gpus_per_node)
        else:
            parent = route.edges[edge.parent]
            assert edge.source == parent.destination and edge.hop == parent.hop + 1
            assert (edge.shard, edge.first_byte, edge.bytes) == (parent.shard, parent.first_byte, parent.bytes)
        assert (edge.via == "nvlink") == (edge.source.node == edge.destination.node)
    for place, worker in workers.items():
        for (shard, other), size in wanted.items():
            if other == worker:
                position = 0
                for low, high in sorted(got.pop((place, shard))):
                    assert low == position, f"{place} {shard}: byte {position} missing or twice"
                    position = high
                assert position == size
    assert not got, "bytes that nobody needs"


def wanted_of(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, lora_rank: int = 0) -> dict:
    return {(flow.shard, flow.worker): flow.bytes for flow in flows(shape, training, rollout, lora_rank=lora_rank)}
