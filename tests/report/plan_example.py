"""A plan of the size that a plan has: 70B on 32 nodes of eight H100, 20 of them training; near the exercise."""

from __future__ import annotations

from launch.model.architecture import Architecture
from launch.model.padding import round_up
from launch.plan.book import Book
from launch.plan.forecast import (
    Alternative,
    Choice,
    ClusterFacts,
    DiskForecast,
    Forecast,
    MemoryOf,
    NodeSplit,
    Number,
    Pareto,
    Phase,
    Reliability,
    RolloutForecast,
    Staleness,
    SyncEdge,
    SyncForecast,
    SyncRoute,
    Throughput,
    Warned,
)
from launch.plan.layouts import layers_of_stage, rank_coordinates
from launch.plan.plan import (
    BatchPlan,
    EnginePlacement,
    EnginePlan,
    ForecastPlan,
    Placement,
    Plan,
    RankPlacement,
    RolloutPlan,
    TrainingPlan,
    read_plan,
)

LLAMA_70B = Architecture(
    family="llama",
    layers=80,
    hidden=8192,
    ffn=28672,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
    norm_eps=1e-5,
    max_positions=131072,
    initializer_range=0.02,
    rope={"rope_type": "default", "rope_theta": 5e5},
)
GPUS = 8
GPU_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def example_plan(*, dp: int = 5, engines: int = 12, spare: int = 0, pp: int = 4, vpp: int = 5, device: str = "gpu",
                 mode: str = "disaggregated", asynchronous: bool = True, faster: float = 1.0, hostile: str = "",
                 leaves: tuple[int, ...] = ()) -> ForecastPlan:
    """A plan with TP4 x CP2 training and engines of TP8.

    Args:
        faster: divides every time, multiplies the throughput.
        hostile: text that is put wherever a user's file can put some.
    """
    training = dp * pp
    rollout = engines if mode == "disaggregated" else 0
    nodes = training + rollout + spare
    plan = TrainingPlan(tp=4, pp=pp, vpp=vpp, cp=2, dp=dp, sequence_parallel=True,
                        padded_vocab=round_up(128256, 128 * 4), layers_of_stage=layers_of_stage(80, pp, vpp),
                        ranks=rank_coordinates(4, 2, dp, pp))
    forecast = Forecast(
        cluster=ClusterFacts(
            name=f"h100-{nodes}{hostile}",
            nodes=nodes,
            gpus_per_node=GPUS,
            gpu="H100-SXM-80GB",
            nics_per_node=8,
            nic_bandwidth=50e9,
            rails=8,
            leaves=leaves or (nodes,),
            source=f"configs/clusters/h100-{nodes}.yaml{hostile}",
        ),
        split=NodeSplit(mode=mode, training=training, rollout=rollout, spare=spare),
        asynchronous=asynchronous,
        memory=_memory(pp),
        phases=_phases(faster, asynchronous, mode),
        step_s=92.2 / faster,
        step_low_s=78.4 / faster,
        step_high_s=108.0 / faster,
        bottleneck="rollout: decoding is bound by HBM bandwidth",
        throughput=Throughput(
            low=8533 * faster,
            nominal=9996 * faster,
            high=11755 * faster,
            target=10000,
            verdict="within its uncertainty",
        ),
        rollout=RolloutForecast(
            tpot_s=0.048 / faster,
            tokens_per_s_per_gpu=1020 * faster,
            in_flight=4369,
            capacity=6380,
            load=4369 / 6380,
            longest_s=403.2 / faster,
            bound_by="HBM bandwidth of decoding",
        ),
        staleness=Staleness(versions=5, mean=1.6, limit=8)
        if asynchronous
        else Staleness(versions=0, mean=0, limit=None),
        sync=_sync(dp, pp, engines),
        reliability=Reliability(
            job_mtbf_hours=61.3,
            checkpoint_bytes=988_000_000_000,
            checkpoint_s=14.0,
            checkpoint_wait_s=0.3,
            checkpoint_host_bytes=55_000_000_000,
            checkpoint_load_s=15.0,
            checkpoint_every_steps=20,
            restart_s=420.0,
            effective_time_ratio=0.981,
        ),
        choices=_choices(hostile),
        pareto=_pareto(faster),
        warnings=(
            Warned(
                code="W003",
                message=f"the target of 10,000 prompts/h lies inside the uncertainty, not below it{hostile}",
            ),
            Warned(
                code="W011",
                message="response lengths are assumed (log-normal, sigma 0.9): measure them with "
                "workload.lengths_from",
            ),
        ),
        numbers=_numbers(faster, hostile),
    )
    return ForecastPlan(config_hash="0123456789abcdef", architecture=LLAMA_70B, device=device, training=plan,
                rollout=RolloutPlan(tp=8, engines=tuple(EnginePlan(replica=n, tp=8) for n in range(engines))),
                batch=BatchPlan(prompts_per_step=256, group_size=16, samples_per_step=4096, updates_per_batch=1,
                                token_budget=8704, sequence_multiple=16, share_prompts=False), forecast=forecast)


def example_placement(plan: Plan, *, prefix: str = "gpu") -> Placement:
    """Training nodes first, then engines, a node each, then spares."""
    split = plan.forecast.split
    names = tuple(f"{prefix}{number:03d}" for number in range(plan.forecast.cluster.nodes))
    shared = split.mode != "disaggregated"
    ranks = []
    for each in plan.training.ranks:
        ranks.append(RankPlacement(rank=each.rank, node=names[each.rank // GPUS], gpu=each.rank % GPUS,
                                   nic=each.rank % GPUS, port=0))
    engines = [
        EnginePlacement(
            nics=GPU_ORDER,
            replica=each.replica,
            node=names[each.replica + (0 if shared else split.training)],
            gpus=GPU_ORDER,
        )
        for each in plan.rollout.engines
    ]
    used = names[:split.training + split.rollout]
    return Placement(attempt=1, plan_fingerprint=plan.fingerprint(), nodes=used, spares=names[len(used):],
                     addresses={name: "10.0.0.1" for name in used}, training=tuple(ranks), rollout=tuple(engines),
                     master_port=0)


def _memory(pp: int) -> tuple[MemoryOf, ...]:
    fixed = {"fixed": 4_500_000_000, "fragmentation": 1_200_000_000}
    state = {"weights": 8_700_000_000, "gradients": 17_400_000_000, "optimizer": 6_600_000_000}
    found = []
    for stage in range(pp):
        activations = 27_500_000_000 - int(stage * 7_200_000_000 / max(1, pp - 1))
        parts = state | {"activations": activations} | fixed
        if stage == pp - 1:
            parts["logits"] = 1_410_000_000
        total = sum(parts.values())
        found.append(MemoryOf(role="training", name=f"stage {stage}", components=parts, total=total,
                              limit=84_932_000_000, verdict="fits"))
    parts = {"weights": 17_640_000_000, "kv cache": 51_300_000_000, "cuda graphs": 2_100_000_000,
             "sync staging": 1_000_000_000}
    found.append(MemoryOf(role="rollout", name="engine", components=parts, total=sum(parts.values()),
                          limit=73_015_000_000, verdict="tight"))
    return tuple(found)


def _phases(faster: float, asynchronous: bool, mode: str) -> tuple[Phase, ...]:
    def phase(name, start, seconds, partition, spread=0.15):
        partition = partition if mode == "disaggregated" else "both"
        return Phase(name=name, seconds=seconds / faster, low=seconds * (1 - spread) / faster,
                     high=seconds * (1 + spread) / faster, starts=start / faster, partition=partition)
    if asynchronous:
        return (phase("rollout", 0.0, 89.8, "rollout"), phase("reward", 0.0, 0.9, "training"),
                phase("train", 0.9, 74.1, "training", 0.12), phase("sync", 89.8, 2.4, "both", 0.4))
    return (phase("rollout", 0.0, 42.0, "rollout"), phase("reward", 42.0, 0.9, "training"),
            phase("logprob", 42.9, 12.0, "training"), phase("train", 54.9, 34.9, "training", 0.12),
            phase("sync", 89.8, 2.4, "both", 0.4))


def _sync(dp: int, pp: int, engines: int) -> SyncForecast:
    shard = 35_280_000_000
    direct = tuple(SyncEdge(partition="training", source=stage * dp + target % dp, target=target, bytes=shard, hop=0)
                   for target in range(engines) for stage in range(pp))
    chain = tuple(SyncEdge(partition="training", source=stage * dp, target=0, bytes=shard, hop=0)
                  for stage in range(pp)) + tuple(
        SyncEdge(partition="rollout", source=target - 1, target=target, bytes=4 * shard, hop=target)
        for target in range(1, engines))
    tree = tuple(SyncEdge(partition="training", source=stage * dp + root % dp, target=root, bytes=shard, hop=0)
                 for root in range(min(2, engines)) for stage in range(pp)) + tuple(
        SyncEdge(partition="rollout", source=(target - 2) // 2, target=target, bytes=4 * shard,
                 hop=(target - 2).bit_length() or 1) for target in range(2, engines))
    return SyncForecast(
        chosen="direct", reason="lowest expected time: five replicas of each shard share twelve receivers",
        payload_bytes=141_107_412_992, gpu_order=GPU_ORDER, cross_rail_bytes_natural=105_900_000_000,
        cross_rail_bytes=0, disk=DiskForecast(every=20, bytes=141_107_412_992, seconds=7.06), routes=(
            SyncRoute(route="direct", lower_bound_s=0.39, expected_s=2.4, busiest_nic_out_bytes=26_460_000_000,
                      busiest_nic_in_bytes=17_640_000_000, hops=1, edges=direct),
            SyncRoute(route="chain", lower_bound_s=0.41, expected_s=4.9, busiest_nic_out_bytes=17_640_000_000,
                      busiest_nic_in_bytes=17_640_000_000, hops=12, edges=chain),
            SyncRoute(route="tree", lower_bound_s=0.41, expected_s=3.1, busiest_nic_out_bytes=35_280_000_000,
                      busiest_nic_in_bytes=17_640_000_000, hops=4, edges=tree)))


def _choices(hostile: str) -> tuple[Choice, ...]:
    return (
        Choice(key="split", value=f"20 training + 12 rollout{hostile}",
               reason="both partitions finish a step within 3 % of each other", alternatives=(
                   Alternative(value="24 training + 8 rollout", prompts_per_hour=7200,
                               rejected_by=f"rollout reaches 7,200 prompts/h{hostile}"),
                   Alternative(value="16 training + 16 rollout", prompts_per_hour=9100,
                               rejected_by="training reaches 9,100 prompts/h"))),
        Choice(key="trainer.layout", value="TP4 CP2 PP4 VPP5 DP5", reason="fastest layout that fits", alternatives=(
            Alternative(value="TP4 CP1 PP4 VPP1 DP10", rejected_by="stage 0 needs 85.0 GB of 84.9 GB"),
            Alternative(value="TP8 CP1 PP2 VPP1 DP10", rejected_by="12 % slower: TP communication 9.1 s a step",
                        prompts_per_hour=8800))),
        Choice(key="rollout.tp", value="8", reason="TP4 holds 4,200 sequences of the 4,369 in flight",
               alternatives=(Alternative(value="4", rejected_by="load 104 %"),
                             Alternative(value="2", rejected_by="16.8 k tokens of KV cache"))),
        Choice(key="sync.route", value="direct", reason="lowest expected time", alternatives=(
            Alternative(value="tree", rejected_by="3.1 s against 2.4 s"),
            Alternative(value="chain", rejected_by="4.9 s against 2.4 s"))))


def _pareto(faster: float) -> tuple[Pareto, ...]:
    points = ((8, 4, 4, 2100), (12, 8, 4, 3400), (16, 8, 8, 4300), (20, 12, 8, 6200), (24, 16, 8, 7200),
              (28, 16, 12, 8600), (32, 20, 12, 9996))
    return tuple(Pareto(nodes=nodes, training=training, rollout=rollout, layout="TP4 CP2 PP4, engines of TP8",
                        prompts_per_hour=rate * faster) for nodes, training, rollout, rate in points)


def _numbers(faster: float, hostile: str) -> tuple[Number, ...]:
    book = Book()
    where = f"configs/70b/grpo.yaml:12, model.path{hostile}"
    hidden = book.given("model.hidden", 8192, "", where)
    layers = book.given("model.layers", 80, "", where)
    book.given("trainer.tp", 4, "", "configs/70b/grpo.yaml:31, trainer.tp")
    book.given("trainer.pp", 4, "", "searched")
    book.given("gpu.bf16_flops", 989.4e12, "FLOP/s", "NVIDIA H100 datasheet, SXM5, dense")
    book.given("workload.group_size", 16, "", "configs/70b/grpo.yaml:40, algorithm.group_size")
    book.given("workload.prompts_per_step", 256, "", "configs/70b/grpo.yaml:41, algorithm.prompts_per_step")
    book.given("coefficients.training.efficiency", 0.52 * faster, "", "fitted to benchmarks/measured, 41 points")
    parameters = book.computed("model.parameters", 70_553_706_496, "", "L layer + 2 V h + h",
                               ("model.hidden", "model.layers"))
    book.computed("work.sequences", 4096, "", "prompts x G", ("workload.group_size", "workload.prompts_per_step"))
    book.computed("work.micro_batches", 240, "", "tokens / (DP x budget)", ("work.sequences",))
    book.computed("memory.training.stage0.weights", parameters // 32 * 4, "bytes", "2 bytes x parameters / (TP PP)",
                  ("model.parameters", "trainer.tp", "trainer.pp"))
    book.computed("memory.training.stage0.activations", 27_500_000_000, "bytes",
                  "33.5 h bytes a token and layer / (TP CP)", ("model.hidden", "model.layers", "trainer.tp"))
    book.computed("training.flops_per_token", 4.32e11, "FLOP", "6 (N - V h) + 6 L n_h d l_eff",
                  ("model.parameters", "model.layers"))
    book.computed("training.compute_s", 70.0 / faster, "s", "FLOPs / (GPUs x rate x efficiency)",
                  ("training.flops_per_token", "work.sequences", "gpu.bf16_flops",
                   "coefficients.training.efficiency"))
    book.computed("training.optimizer_s", 0.5 / faster, "s", "bytes of state / HBM", ("model.parameters",))
    book.computed("training.dp_s", 0.7 / faster, "s", "what overlap does not hide", ("model.parameters",))
    assert hidden * layers
    book.computed("training.total_s", 74.1 / faster, "s", "sum of the parts",
                  ("training.compute_s", "training.dp_s", "training.optimizer_s"))
    return tuple(Number(key=e.key, value=e.value, unit=e.unit, formula=e.formula, inputs=e.inputs, source=e.source)
                 for e in book)


def without_forecast(plan: Plan) -> Plan:
    """The same plan, of which nothing is predicted."""
    return read_plan(plan.model_dump() | {"forecast": None})
