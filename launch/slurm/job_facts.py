"""Facts of the current job, from its environment and one query to Slurm for the rest."""

from __future__ import annotations

import time

from pydantic import BaseModel, ConfigDict

from launch import envvars
from launch.cluster import hostlist
from launch.errors import UserError
from launch.slurm.client import Slurm
from launch.slurm.records import JobRecord, ahead_s
from launch.slurm.refusals import SlurmError


class JobFacts(BaseModel):
    """`attempts/<n>/job.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    job_id: str
    name: str
    nodes: tuple[str, ...]
    """In Slurm's order, which is the order of the tasks of a step."""
    first_node: str
    """Node on which the batch script, and therefore the leader, runs."""
    end_time: float | None
    """When the time limit ends the job, by this machine's clock (seconds since 1970); None without a limit."""
    controller_ahead_s: float = 0.0
    """Seconds by which the controller's clock is ahead of this machine's, if more than the duration of the query."""
    restart_count: int
    """Number of requeues so far."""
    requeue: bool
    """Whether Slurm may requeue the job."""
    partition: str
    account: str
    qos: str
    reservation: str
    excluded: tuple[str, ...]
    """Nodes that the submission excluded."""
    cpus_per_node: int
    """CPUs of the job on the node with the fewest."""
    gpus_per_node: int | None
    """GPUs of the job on this node; None if Slurm does not report them."""
    time_limit: str
    submit_dir: str
    command: str
    comment: str
    log: str
    """The batch script's output file."""


def read(slurm: Slurm) -> JobFacts:
    """Facts of the job that this process belongs to. Sends one query to Slurm.

    Raises:
        UserError: this process is not in a job, or the node list contradicts the number of nodes.
        SlurmError: Slurm does not answer.
    """
    job_id = envvars.get("SLURM_JOB_ID")
    if job_id is None:
        raise UserError("this is not a Slurm job: SLURM_JOB_ID is not set", where="megatron-rl job",
                        fix="submit it: sbatch slurm/grpo_7b.sbatch, or megatron-rl launch CONFIG --on slurm")
    asked = time.time()
    record = slurm.show_job(job_id, local=True)
    return combine(record, ahead_s(record, asked, time.time()))


def combine(record: JobRecord, ahead_s: float = 0.0) -> JobFacts:
    """Facts from the environment and the record.

    Args:
        ahead_s: see `records.ahead_s`.
    """
    text, count = envvars.get("SLURM_JOB_NODELIST"), envvars.get("SLURM_JOB_NUM_NODES")
    nodes = hostlist.expand(text, "SLURM_JOB_NODELIST") if text else record.nodes
    expected = int(count) if count and count.isdecimal() else record.node_count
    if len(nodes) != expected or len(set(nodes)) != len(nodes):
        raise SlurmError(f"the job's node list {text or ','.join(record.nodes)!r} names {len(set(nodes))} nodes, but "
                         f"the job has {expected}", where="SLURM_JOB_NODELIST, SLURM_JOB_NUM_NODES",
                         fix="these variables were changed after Slurm set them: remove the cause")
    gpus = envvars.get("SLURM_GPUS_ON_NODE")
    return JobFacts(
        job_id=record.job_id, name=record.name, nodes=nodes, first_node=envvars.get("SLURMD_NODENAME") or nodes[0],
        end_time=None if record.ends is None else record.ends - ahead_s, controller_ahead_s=ahead_s,
        restart_count=int(envvars.get("SLURM_RESTART_COUNT") or record.restarts),
        requeue=record.requeue, partition=record.partition, account=record.account, qos=record.qos,
        reservation=record.reservation, excluded=record.excluded,
        cpus_per_node=_cpus(envvars.get("SLURM_JOB_CPUS_PER_NODE") or envvars.get("SLURM_CPUS_ON_NODE") or "1"),
        gpus_per_node=int(gpus) if gpus and gpus.isdecimal() else None, time_limit=record.time_limit,
        submit_dir=envvars.get("SLURM_SUBMIT_DIR") or record.work_dir, command=record.command, comment=record.comment,
        log=record.stdout)


def _cpus(text: str) -> int:
    """The smallest number in `96(x31),48`."""
    return min(int(part.partition("(")[0]) for part in text.split(","))
