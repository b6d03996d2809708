"""The plan of a Slurm job, held against the allocation that was really given, and its placement on accepted nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from launch.cluster.spec import Switch
from launch.cluster.tree import FLAT, faults, natural_order, path_of, restrict, switches_of
from launch.config.load import LoadedConfig
from launch.errors import UserError
from launch.fabric.lanes import leaf_of_nodes
from launch.plan.plan import Placement
from launch.planner.prepare import OnCluster, prepare_job
from launch.planner.seats.cluster import bind, place
from launch.planner.seats.local import place_cpu
from launch.ports import Ports
from launch.run.node_files import Hello
from launch.runtime.replan import for_fewer
from launch.slurm.client import Slurm
from launch.slurm.job_facts import JobFacts
from launch.slurm.render import plan_hash_of


def plan_job(path: str, words: Sequence[str], loaded: LoadedConfig, facts: JobFacts) -> OnCluster:
    """Plan the configuration and compare the plan with the allocation.

    With `run.replan`, an allocation that differs is planned for anew. One with fewer nodes, but no fewer than
    `run.min_nodes`, is taken as it is: the placement then makes the plan smaller.

    Raises:
        UserError: the configuration, or an allocation that differs from the plan; names both.
    """
    run = loaded.config.run
    made = prepare_job(path, words)
    differences = _differences(made, facts, run.min_nodes)
    if not differences:
        return made
    if not run.replan:
        raise UserError("the allocation differs from the plan: " + "; ".join(differences),
                        where=f"job {facts.job_id}; {loaded.where('cluster')}",
                        fix=f"submit with --nodes={made.needed + made.spares}, plan for what is given "
                            "(cluster=...), or allow a new plan with run.replan=true")
    given = replace(made.cluster, nodes=facts.nodes, switches=(),
                    gpus_per_node=facts.gpus_per_node or made.cluster.gpus_per_node)
    return prepare_job(path, words, given)


def _differences(made: OnCluster, facts: JobFacts, min_nodes: int | None) -> list[str]:
    """Each names the plan's number and the allocation's."""
    planned, given = made.needed + made.spares, len(facts.nodes)
    found = []
    if given > planned or given < (planned if min_nodes is None else min(planned, min_nodes)):
        spare = f" ({made.spares} of them spare)" if made.spares else ""
        found.append(f"planned for {planned} nodes{spare}, given {given}")
    gpus = facts.gpus_per_node
    if made.plan.device == "gpu" and gpus is not None and gpus != made.cluster.gpus_per_node:
        found.append(f"planned for {made.cluster.gpus_per_node} GPUs a node, given {gpus}")
    submitted, now = plan_hash_of(facts.comment), made.plan.fingerprint()
    if submitted is not None and submitted != now:
        found.append(f"submitted as plan {submitted}, and the configuration now makes plan {now}")
    return found


def place_job(made: OnCluster, accepted: Sequence[str], avoid: Collection[str], hellos: Mapping[str, Hello],
              attempt: int, switches: tuple[Switch, ...] = ()) -> tuple[OnCluster, Placement, str]:
    """Place the plan on the accepted nodes, or a smaller one where they are too few.

    Args:
        accepted: fit nodes, in any order; more than needed leaves spares.
        avoid: those to leave among the spares if possible.
        hellos: of every accepted node: address, ports.
        switches: above them (`switches_of_job`); () where that is not known.

    Returns:
        (the plan that is run, its placement, what was made smaller: "" if nothing).

    Raises:
        UserError: too few nodes, by `run.min_nodes` or because nothing fits.
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
    """The switch tree over these nodes: as they say themselves, else as Slurm says when it is asked, once. () where
    Slurm knows none, or what it says is no tree over them: then a warning."""
    paths = {node: path_of(hellos[node].topology, hellos[node].topology_pattern) for node in nodes}
    if tree := switches_of(paths):
        return tree
    silent = [node for node in nodes if not paths[node] and hellos[node].topology_pattern != FLAT]
    if not silent or len(nodes) == 1:
        return ()       # Slurm has no topology plug-in, and all nodes say so
    try:
        found = restrict(slurm.topology(blocks=True), set(nodes))
        misfits = [what for _, what, _ in faults(found, list(nodes))]
        why = misfits[0] if misfits else "" if found else "Slurm knows no switches"
    except UserError as error:
        found, why = (), error.what
    if not why:
        return found
    address = hellos[silent[0]].topology
    say(f"warning topology.unknown: of its switches (SLURM_TOPOLOGY_ADDR) {silent[0]} says "
        f"{repr(address) if address else 'nothing'}, and of `scontrol show topology`: {why}. The job is placed without "
        "regard to switches; see TopologyPlugin and TopologyParam of slurm.conf")
    return ()
