"""Where the processes of a measured plan run: on this machine, or on the nodes of the current allocation."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.cluster import local
from launch.cluster.interfaces import job_address
from launch.coefficients.sync import SyncCoefficients
from launch.fabric.choose import SyncPrediction
from launch.fabric.estimate import Kind
from launch.fabric.lanes import Place, engine_gpus
from launch.fabric.seated import Seats
from launch.plan.plan import Placement
from launch.planner.prepare import OnCluster, PreparedForecast
from launch.planner.search.candidate import Candidate
from launch.planner.seats.local import place_local
from launch.ports import allocate
from launch.runtime.job_plan import place_job, switches_of_job
from launch.slurm import job_facts
from launch.slurm.client import Slurm
from launch.slurm.profiles import load_profile
from launch.slurm.step import step
from megatron_rl.driver.sync_plan import sync_plan
from megatron_rl.sync_bench.agents import Agents
from megatron_rl.sync_bench.members import Host, Members
from megatron_rl.sync_bench.world import PRELOAD


@dataclass(frozen=True)
class Site:
    """Placed processes and what the measurement needs to know about them."""

    what: str
    """Description in words."""
    address: str
    """Address of this process that all members reach."""
    members: Members
    placement: Placement
    hosts: Mapping[str, Host]
    """By node of the placement."""
    seats: Seats
    """Seats that the sync is routed over."""
    planned_seats: Seats
    """Seats that the prediction was made for."""
    route: Kind
    bucket_bytes: int
    sync: SyncPrediction
    coefficients: SyncCoefficients


@contextmanager
def this_machine(prepared: PreparedForecast, logs: Path) -> Iterator[Site]:
    """Run everything on this machine over loopback, routed as planned, as if nodes were separate."""
    plan, found, sync = prepared.plan, prepared.found, _sync_of(prepared.found)
    host = Host("this machine")
    ports = allocate(address=host.address)
    try:
        with Members(PRELOAD, logs) as members:
            gpus = local.gpus() if plan.device == "gpu" else ()
            placement = place_local(plan, 0, ports, gpus=gpus, node=host.name, address=host.address)
            seats = planned_seats(found)
            bucket = int(prepared.config.weight_sync.bucket_mb * (1 << 20))
            yield Site(f"{len(os.sched_getaffinity(0))} cores", host.address, members, placement, {host.name: host},
                       seats, seats, sync.chosen, min(bucket, sync.cost.chunk_bytes), sync,
                       found.problem.coefficients.sync)
    finally:
        ports.release()


@contextmanager
def allocation(prepared: PreparedForecast, logs: Path) -> Iterator[Site]:
    """Use the nodes of the Slurm job that this process runs in (salloc, sbatch), placed as for a run.

    Raises:
        UserError: this is not a job, or it has fewer nodes than the plan needs.
        MemberError: a node did not answer.
    """
    assert isinstance(prepared, OnCluster), "`check` lets no other through"
    config, slurm = prepared.config, Slurm()
    facts = job_facts.read(slurm)
    profile = load_profile(config.run.profile)
    run_on_all = functools.partial(step, nodes=facts.nodes, cpus=facts.cpus_per_node, profile=profile, wait_s=0)
    with Agents(facts.nodes, run_on_all, PRELOAD, logs, config.run.deadline_s, profile.interfaces.socket) as agents:
        switches = switches_of_job(agents.hellos, facts.nodes, slurm)
        made, placement, _ = place_job(prepared, facts.nodes, (), agents.hellos, 0, switches)
        plan, found = made.plan, made.found
        planned = sync_plan(config, plan, placement)
        with Members(PRELOAD, logs, agents) as members:
            yield Site(f"{len(placement.nodes)} nodes of job {facts.job_id}",
                       job_address(profile.interfaces.socket).address, members, placement,
                       {node: Host(node, placement.addresses[node]) for node in placement.nodes}, planned.seats,
                       planned_seats(found), planned.route, planned.bucket_bytes, _sync_of(found),
                       found.problem.coefficients.sync)


def _sync_of(found: Candidate) -> SyncPrediction:
    """The predicted sync of a plan that has one, as `check` made sure."""
    assert found.sync is not None
    return found.sync


def planned_seats(found: Candidate) -> Seats:
    """Seats in the plan's fabric: training ranks first, engines on nodes of their own."""
    sync, rollout = _sync_of(found), found.rollout.layout
    fabric = sync.traffic.fabric
    ranks = found.training.layout.gpus
    first = -(-ranks // fabric.gpus_per_node)
    places = {(replica, worker): place._replace(node=first + place.node) for replica in range(rollout.replicas)
              for worker, place in enumerate(engine_gpus(rollout.tp, rollout.pp, replica, sync.gpu_order,
                                                         fabric.gpus_per_node))}
    return Seats(fabric, tuple(Place(*divmod(rank, fabric.gpus_per_node)) for rank in range(ranks)), places)
