"""The forecast of a candidate: its numbers in the form of `plan.json`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from launch.fabric.choose import SyncPrediction
from launch.fabric.communicators import Communicators
from launch.fabric.estimate import Kind
from launch.plan.forecast import (
    ClusterFacts,
    DiskForecast,
    Forecast,
    MemoryOf,
    NodeSplit,
    Pareto,
    Partitions,
    Phase,
    PhaseName,
    Reliability,
    RewardForecast,
    RolloutForecast,
    Staleness,
    SyncEdge,
    SyncForecast,
    SyncRoute,
    TargetVerdict,
    Throughput,
)
from launch.plan.layouts import wide_bytes
from launch.planner.explain.choices import choices, layout_name
from launch.planner.explain.evaluate import book_of
from launch.planner.explain.warnings import cautions
from launch.planner.search.candidate import Candidate, step_seconds
from launch.planner.search.search import Search
from launch.planner.time.reward import behind_seconds
from launch.planner.time.rollout import mean_staleness

FRONT = 12
"""Number of cluster sizes at which the Pareto front is sampled."""


def forecast(search: Search | None, found: Candidate, sources: Mapping[str, str]) -> Forecast:
    """All predictions for a candidate, with reasons.

    Args:
        search: the search that found it; None: its sizes were given, so there are no choices to explain.
        sources: see `book_of`.
    """
    problem, failures = found.problem, found.failures
    phases = _phases(found)
    throughput = throughput_of(found)
    rollout = found.rollout
    return Forecast(
        cluster=_cluster(found, sources), split=_split(found), asynchronous=problem.asynchronous,
        memory=_memory(found), phases=phases, step_s=found.step_s, step_low_s=_per_step(found, throughput.high),
        step_high_s=_per_step(found, throughput.low), bottleneck=_bottleneck(found), throughput=throughput,
        rollout=RolloutForecast(
            tpot_s=rollout.time.tpot_s, tokens_per_s_per_gpu=rollout.time.tokens_per_s / rollout.layout.gpus,
            in_flight=rollout.time.in_flight * found.rollout_busy, capacity=rollout.time.slots,
            load=found.rollout_load, longest_s=rollout.time.latency_max_s, bound_by=rollout.time.limit),
        reward=RewardForecast(nodes=found.training_nodes, processes=found.reward.processes,
                              sample_s=found.reward.sample_s, busy_s=found.reward.busy_s,
                              behind_s=found.reward.behind_s),
        staleness=Staleness(versions=problem.max_staleness or found.staleness, mean=_mean_staleness(found),
                            limit=problem.max_staleness),
        sync=_sync(found).model_copy(update={"disk": _disk(found)}), reliability=Reliability(
            job_mtbf_hours=failures.job_mtbf_hours, checkpoint_bytes=failures.checkpoint_bytes,
            checkpoint_s=failures.checkpoint_s, checkpoint_wait_s=failures.checkpoint_wait_s,
            checkpoint_host_bytes=failures.host_bytes, checkpoint_load_s=failures.load_s,
            checkpoint_every_steps=failures.every_steps, restart_s=problem.coefficients.reliability.restart_s,
            effective_time_ratio=failures.effective_time_ratio),
        choices=choices(search, found) if search else (), pareto=_front(search, found) if search else (),
        warnings=cautions(found, throughput.low, throughput.high),
        numbers=tuple(book_of(found, sources)))


def _cluster(found: Candidate, sources: Mapping[str, str]) -> ClusterFacts:
    cluster = found.problem.cluster
    leaves = tuple(len(switch.nodes) for switch in cluster.switches if switch.nodes) or (len(cluster.nodes),)
    return ClusterFacts(name=cluster.name, nodes=len(cluster.nodes), gpus_per_node=cluster.gpus_per_node,
                        gpu=cluster.gpu.name, nics_per_node=cluster.nics_per_node, nic_bandwidth=cluster.nic_bandwidth,
                        rails=cluster.rails, leaves=leaves, source=sources.get("cluster", cluster.name))


def _split(found: Candidate) -> NodeSplit:
    training, rollout = found.nodes_used
    spare = len(found.problem.cluster.nodes) - training - rollout
    return NodeSplit(mode=found.mode, training=training, rollout=rollout, spare=spare)


def _memory(found: Candidate) -> tuple[MemoryOf, ...]:
    training, engine = found.training.memory, found.rollout.memory
    if found.problem.cluster.gpu.device == "cpu":
        return ()
    rows = [MemoryOf(role="training", name=f"stage {stage.stage}", components=stage.components, total=stage.total,
                     limit=training.limit, verdict=stage.verdict)
            for stage in training.stages]
    rows.append(MemoryOf(role="rollout", name="engine", components=engine.components, total=engine.total,
                         limit=engine.limit, verdict=engine.verdict))
    return tuple(rows)


def _spread(found: Candidate, name: str) -> tuple[float, float]:
    """(fastest, slowest) time of a phase relative to its nominal time: the spread of the calibration's points."""
    rl = found.problem.coefficients.rl
    if name == "rollout":
        return (rl.rollout_efficiency / rl.rollout_efficiency_high, rl.rollout_efficiency / rl.rollout_efficiency_low)
    if name == "sync":
        return 1 / found.problem.coefficients.sync.uncertainty, found.problem.coefficients.sync.uncertainty
    fast, slow = rl.train_efficiency / rl.train_efficiency_high, rl.train_efficiency / rl.train_efficiency_low
    if name == "train":
        return fast, slow
    # The time of a pass without gradients is predicted from the training time.
    return fast * rl.logprob_factor_low / rl.logprob_factor, slow * rl.logprob_factor_high / rl.logprob_factor


def _phases(found: Candidate) -> tuple[Phase, ...]:
    """The phases, in the order in which a partition runs them. In an asynchronous step both partitions start together.
    With `algorithm.overlap` the update ends with the step; it is drawn as if it were not interrupted.
    """
    training, asynchronous = found.training, found.problem.asynchronous
    apart = found.mode == "disaggregated"
    generating: Partitions = "rollout" if apart else "both"
    updating: Partitions = "training" if apart else "both"
    parts: tuple[tuple[PhaseName, float, Partitions], ...] = (
        ("rollout", found.rollout.seconds, generating), ("reward", found.reward.seconds, updating),
        ("logprob", training.logprob_s, updating),
        ("reference", training.reference_s, updating), ("teacher", training.teacher_s, updating),
        ("train", training.train_s, updating),
        ("sync", found.sync_s, "both"))
    at, rows = 0.0, []
    for name, seconds, partition in parts:
        if not seconds:
            continue
        if name == "sync" and asynchronous and found.problem.swaps:
            partition = "training"              # engines continue; their swap is too short for the picture
        elif name == "sync":
            at = found.step_s - seconds
        if name == "reward":
            at = max(0.0, min(at, found.step_s - seconds))      # engines that run on have no last completion of a step
            low, high = _rewarded(found, 0)[1], _rewarded(found, 1)[1]
        else:
            low, high = (seconds * end for end in _spread(found, name))
        rows.append(Phase(name=name, seconds=seconds, low=low, high=high, starts=at, partition=partition))
        at += seconds
        if name == "reward" and (asynchronous or found.rollout.completions):
            at = 0.0 if asynchronous else found.step_s - found.sync_s - training.seconds
    return tuple(rows)


def _rewarded(found: Candidate, end: int) -> tuple[float, float]:
    """(seconds of grading that are left when the last completion ends, the same with the last group), if rollout and
    rewards are at their fast (0) or slow (1) end."""
    reward, rollout_s = found.reward, found.rollout.seconds * _spread(found, "rollout")[end]
    sample_s = reward.spread[end]
    behind_s = behind_seconds(rollout_s, reward.busy_s * sample_s / reward.sample_s, reward.completions)
    return behind_s, behind_s + reward.last_seconds(sample_s)


def throughput_of(found: Candidate) -> Throughput:
    """Prompts per hour: nominal, with all phases at their slow end, and with all at their fast end."""
    problem, target = found.problem, found.problem.workload.target
    rates = []
    for end in (1, 0):      # all phases at their slow end, then all at their fast end
        behind_s, rewarded_s = _rewarded(found, end)
        rollout = found.rollout.seconds * _spread(found, "rollout")[end]
        longest = found.rollout.longest_s * _spread(found, "rollout")[end]
        training = sum(seconds * _spread(found, name)[end] for name, seconds in (
            ("train", found.training.train_s),
            ("passes", found.training.passes_s)))
        rates.append(3600 * problem.workload.prompts
                     / step_seconds(problem, rollout + (behind_s if problem.in_flight else rewarded_s), training,
                                    found.sync_s * _spread(found, "sync")[end],
                                    longest + rewarded_s - behind_s if longest else 0.0, found.rollout.swap_s,
                                    found.rollout.completions))
    low, high = rates
    verdict: TargetVerdict = ("no target" if target is None else "reached" if low >= target else
                              "within its uncertainty" if high >= target else "missed")
    return Throughput(low=low, nominal=found.prompts_per_hour, high=high, target=target, verdict=verdict)


def _per_step(found: Candidate, prompts_per_hour: float) -> float:
    return 3600 * found.problem.workload.prompts / prompts_per_hour


def _bottleneck(found: Candidate) -> str:
    if found.waits:
        return f"algorithm.max_staleness = {found.problem.max_staleness}: the trainer waits for the longest completion"
    if found.reward.busy_s > max(found.rollout.seconds, found.training.seconds):
        return f"rewards, on {found.reward.processes} processes of {found.training_nodes} nodes"
    if found.rollout.seconds >= found.training.seconds:
        return f"rollout, bound by {found.rollout.time.limit}"
    time = found.training.time
    parts = {"matrix products": time.matmul_s, "attention": time.attention_s,
             "element-wise kernels": time.elementwise_s, "gaps between kernels": time.gaps_s,
             "TP communication": time.tp_s, "CP communication": time.cp_s,
             "the pipeline's bubble": time.pp_bubble_s, "DP communication": time.dp_s,
             "the optimizer and the fixed cost of a step": time.optimizer_s}
    largest = max(parts, key=parts.__getitem__)
    return f"training, most of it {largest} ({parts[largest] / time.total_s:.0%})"


def _mean_staleness(found: Candidate) -> float:
    problem, time = found.problem, found.rollout.time
    bound = problem.max_staleness or found.staleness
    if not problem.in_flight:
        return float(bound)         # engines that drain generate a batch between two commits
    return mean_staleness(problem.workload.lengths, time.tpot_s, found.step_s, bound)


def _sync(found: Candidate) -> SyncForecast:
    if found.sync is None:
        route = SyncRoute(route="in place", lower_bound_s=0.0, expected_s=found.sync_s, busiest_nic_out_bytes=0,
                          busiest_nic_in_bytes=0, hops=0)
        return SyncForecast(chosen="in place", reason=f"{found.mode}: the weights stay on their GPUs", payload_bytes=0,
                            routes=(route,), gpu_order=(), cross_rail_bytes_natural=0, cross_rail_bytes=0)
    sync, gpus = found.sync, found.problem.cluster.gpu.device == "gpu"
    routes = tuple(SyncRoute(route=kind, lower_bound_s=cost.lower_bound_s, expected_s=cost.expected_s,
                             busiest_nic_out_bytes=max(cost.trainer_nic_out_bytes, cost.rollout_nic_out_bytes),
                             busiest_nic_in_bytes=cost.rollout_nic_in_bytes, hops=cost.hops,
                             chunk_bytes=cost.chunk_bytes, edges=_edges(sync, kind, found.training_nodes),
                             **(_opening(sync.needs[kind]) if gpus else {}))
                   for kind, cost in sync.routes.items())
    return SyncForecast(chosen=sync.chosen, reason=sync.reason, payload_bytes=sync.replica_bytes, routes=routes,
                        staging="shadow" if found.problem.shadow else "in_place", pauses=found.pauses,
                        gpu_order=sync.gpu_order, cross_rail_bytes_natural=sync.natural_cross_rail_bytes,
                        cross_rail_bytes=sync.cross_rail_bytes)


def _opening(needed: Communicators) -> dict[str, Any]:
    return {"communicators": needed.busiest, "communicator_bytes": needed.bytes,
            "communicators_total": needed.total, "opening_rounds": needed.rounds, "opening_s": needed.opening_s}


def _disk(found: Candidate) -> DiskForecast | None:
    problem = found.problem
    if not problem.disk_every:
        return None
    nbytes = wide_bytes(found.training.layout.precision) * found.parameters
    return DiskForecast(every=problem.disk_every, bytes=nbytes, seconds=found.disk_s)


def _edges(sync: SyncPrediction, kind: Kind, trainers: int) -> tuple[SyncEdge, ...]:
    """Bytes that one node sends to another over its NICs, all shards together. Training nodes are numbered first."""
    together: dict[tuple[int, int, int], int] = defaultdict(int)
    for edge in sync.build(kind).edges:
        if edge.via == "nic":
            together[edge.source.node, edge.destination.node, edge.hop - 1] += edge.bytes
    return tuple(SyncEdge(partition="training" if source < trainers else "rollout",
                          source=source if source < trainers else source - trainers, target=target - trainers,
                          bytes=size, hop=hop) for (source, target, hop), size in sorted(together.items()))


def _front(search: Search, found: Candidate) -> tuple[Pareto, ...]:
    """The best plans of smaller clusters, without those that a plan with fewer nodes beats."""
    problem, most = search.problem, search.problem.units
    sizes = sorted({most, *(max(1, round(most * i / FRONT)) for i in range(1, FRONT + 1))})
    per_unit = 1 if len(problem.cluster.nodes) > 1 else 0
    front, best = [], 0.0
    for units in sizes:
        point = found if units == most else search.best(units)
        if point is not None and point.prompts_per_hour > best:
            best = point.prompts_per_hour
            rollout = point.rollout.units if point.mode == "disaggregated" else 0
            front.append(Pareto(nodes=point.units if per_unit else 1, training=point.training.units, rollout=rollout,
                                layout=layout_name(point.training.layout), prompts_per_hour=best))
    return tuple(front)
