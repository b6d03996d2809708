"""The plan of a Slurm job, compared with the actual allocation, its placement on the accepted nodes, and how long its
processes may take to start: a 70B model takes longer to read, build and compile than a tiny one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from launch.cluster.spec import Switch
from launch.cluster.tree import FLAT, faults, natural_order, path_of, restrict, switches_of
from launch.config.load import LoadedConfig
from launch.errors import UserError
from launch.fabric.lanes import leaf_of_nodes
from launch.plan.plan import ForecastPlan, Placement
from launch.planner.prepare import OnCluster, prepare_job
from launch.planner.seats.cluster import bind, place
from launch.planner.seats.local import place_cpu
from launch.ports import Ports
from launch.run.faults import trains
from launch.run.node_files import Hello
from launch.runtime.replan import for_fewer
from launch.slurm.client import Slurm
from launch.slurm.job_facts import JobFacts
from launch.slurm.margin import needed
from launch.slurm.profiles import Profile
from launch.slurm.render import plan_hash_of

ENGINE_S = 600.0
"""Seconds to read libraries on all nodes from a shared file system, and to compile and capture CUDA graphs."""
BUSY = 3.0
"""Slow-down factor of reading and first writing a checkpoint, with all ranks at once and other jobs active."""
STEPS = 2.0
"""Slow-down factor of the first step, which compiles kernels, opens connections and fills caches."""
IMAGE_S = 1800.0
"""Seconds to fetch and unpack a container image of tens of gigabytes before a node's first process starts."""


def plan_job(path: str, words: Sequence[str], loaded: LoadedConfig, facts: JobFacts) -> OnCluster:
    """Plan the configuration and compare the plan with the allocation.

    With `run.replan`, a different allocation gets a new plan. An allocation with fewer nodes, but at least
    `run.min_nodes`, is accepted: the placement then makes the plan smaller.

    Raises:
        UserError: the configuration is invalid, or the allocation differs from the plan; the message names both.
    """
    run = loaded.config.run
    made = prepare_job(path, words)
    differences = _differences(made, facts, run.min_nodes)
    if not differences:
        return made
    if not run.replan:
        raise UserError("the allocation differs from the plan: " + "; ".join(differences),
                        where=f"job {facts.job_id}; {loaded.where('cluster')}",
                        fix=f"submit with --nodes={made.needed + made.spares}, plan for the allocation "
                            "(cluster=...), or allow a new plan with run.replan=true")
    given = replace(made.cluster, nodes=facts.nodes, switches=(),
                    gpus_per_node=facts.gpus_per_node or made.cluster.gpus_per_node)
    return prepare_job(path, words, given)


def _differences(made: OnCluster, facts: JobFacts, min_nodes: int | None) -> list[str]:
    """The differences, each with the number of the plan and of the allocation."""
    planned, given = made.needed + made.spares, len(facts.nodes)
    found = []
    if given > planned or given < (planned if min_nodes is None else min(planned, min_nodes)):
        spare = f" ({made.spares} of them spare)" if made.spares else ""
        found.append(f"planned for {planned} nodes{spare}, allocated {given}")
    gpus = facts.gpus_per_node
    if made.plan.device == "gpu" and gpus is not None and gpus != made.cluster.gpus_per_node:
        found.append(f"planned for {made.cluster.gpus_per_node} GPUs per node, allocated {gpus}")
    submitted, now = plan_hash_of(facts.comment), made.plan.fingerprint()
    if submitted is not None and submitted != now:
        found.append(f"submitted as plan {submitted}, but the configuration now gives plan {now}")
    return found


def place_job(made: OnCluster, accepted: Sequence[str], avoid: Collection[str], hellos: Mapping[str, Hello],
              attempt: int, switches: tuple[Switch, ...] = ()) -> tuple[OnCluster, Placement, str]:
    """Place the plan on the accepted nodes, or a smaller plan if there are too few.

    Args:
        accepted: fit nodes, in any order; surplus nodes become spares.
        avoid: nodes to keep as spares if possible.
        hellos: the greeting of every accepted node, with its address and ports.
        switches: the switches above the nodes (`switches_of_job`); () if unknown.

    Returns:
        (the plan to run, its placement, the reduced sizes or "").

    Raises:
        UserError: there are fewer nodes than `run.min_nodes`, or no smaller plan fits.
    """
    smaller = ""
    if len(accepted) < made.needed:
        made, sizes = for_fewer(len(accepted), made, made.config.run.min_nodes)
        smaller = str(sizes)
    cluster = replace(made.cluster, nodes=tuple(accepted), switches=switches)
    addresses = {node: hellos[node].address for node in accepted}
    interfaces = {node: hellos[node].interface for node in accepted}
    ports = {node: Ports(hellos[node].ports) for node in accepted}
    plan = made.plan
    if plan.device == "cpu":
        order = natural_order(set(accepted) - set(avoid)) + natural_order(avoid)
        order = [node for node in order if node in accepted][:made.needed]
        placement = place_cpu(plan, attempt, order, plan.forecast.split.training, addresses, ports, interfaces)
        left = tuple(node for node in natural_order(accepted) if node not in placement.nodes)
        return made, placement.model_copy(update={"spares": left, "leaves": leaf_of_nodes(cluster)}), smaller
    found = made.found
    seating = place(found.training.layout, found.rollout.layout, cluster, accepted, mode=found.mode, avoid=avoid,
                    gpu_order=found.sync.gpu_order if found.sync else (),
                    tp_across_nodes=made.config.placement.tp_across_nodes)
    bound = bind(seating, plan.fingerprint(), attempt, addresses, ports, interfaces)
    return made, bound.model_copy(update={"leaves": leaf_of_nodes(cluster)}), smaller


def switches_of_job(hellos: Mapping[str, Hello], nodes: Sequence[str], slurm: Slurm,
                    say: Callable[[str], None] = lambda line: None) -> tuple[Switch, ...]:
    """The switch tree over these nodes: from their environment, else from one query to Slurm. () if Slurm has no
    topology, or, with a warning, if its topology is not a tree over these nodes."""
    paths = {node: path_of(hellos[node].topology, hellos[node].topology_pattern) for node in nodes}
    if tree := switches_of(paths):
        return tree
    silent = [node for node in nodes if not paths[node] and hellos[node].topology_pattern != FLAT]
    if not silent or len(nodes) == 1:
        return ()       # all nodes report that Slurm has no topology plug-in
    try:
        found = restrict(slurm.topology(blocks=True), set(nodes))
        misfits = [what for _, what, _ in faults(found, list(nodes))]
        why = misfits[0] if misfits else "" if found else "Slurm knows no switches"
    except UserError as error:
        found, why = (), error.what
    if not why:
        return found
    address = hellos[silent[0]].topology
    say(f"warning topology.unknown: {silent[0]} reports {repr(address) if address else 'nothing'} as its switches "
        f"(SLURM_TOPOLOGY_ADDR), and `scontrol show topology` is unusable: {why}. The job is "
        "placed without regard to switches; see TopologyPlugin and TopologyParam in slurm.conf")
    return ()


def start_deadline_s(loaded: LoadedConfig, plan: ForecastPlan, profile: Profile) -> float:
    """`run.deadline_s` if the user set it or nothing large starts (a rehearsal); else the time that this plan may take,
    at least the default."""
    asked = loaded.config.run.deadline_s
    source = loaded.sources.get("run.deadline_s")
    if source is not None and source.kind in ("file", "override") or not trains(loaded.config):
        return asked
    engine_s = ENGINE_S if plan.device == "gpu" else asked
    need = needed(plan, profile)
    checkpoint_s = max(need.checkpoint_s, plan.forecast.reliability.checkpoint_load_s)
    return max(asked, engine_s + BUSY * checkpoint_s, STEPS * need.step_s)


def with_start_deadline(made: OnCluster, profile: Profile) -> OnCluster:
    """The job plan with this deadline in its configuration, where the processes of the job read it."""
    return made.changed({"run.deadline_s": start_deadline_s(made.loaded, made.plan, profile)})


def greeting_s(deadline_s: float, profile: Profile) -> float:
    """Seconds that the supervisor of a node may take to greet."""
    return deadline_s + (IMAGE_S if profile.container.kind != "none" else 0.0)
