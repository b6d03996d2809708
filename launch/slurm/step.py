"""The single step of a job: one task per node with all its resources, inside the site's container if there is one; and
the errors of `srun`. Pure except for the working directory and this process's environment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from launch import envvars
from launch.cluster import hostlist
from launch.errors import UserError
from launch.slurm import container
from launch.slurm.profiles import Profile
from launch.slurm.refusals import explain, names

REPOSITORY = Path(__file__).resolve().parents[2]
SLURM = re.compile(r"(?:SLURM|SRUN|SBATCH|SALLOC|PMI)_\w+")
KEPT = re.compile(r"SLURM_(?:JOB_\w+|JOBID|ARRAY_\w+|SUBMIT_\w+|TOPOLOGY_\w+|RESTART_COUNT|CLUSTER_NAME|"
                  r"WORKING_CLUSTER|NODE_ALIASES|CONF|CONF_SERVER|JWT|SACK_SOCKET|NODEID|PROCID|LOCALID|"
                  r"GPUS_ON_NODE|CPUS_ON_NODE)")
"""Slurm's variables that identify the job and its controller, without options of `srun`. A list of variables to remove
would be long and grow with every version: SLURM_HINT, SLURM_EXACT, SLURM_OVERCOMMIT, SLURM_CPU_BIND, SLURM_MPI_TYPE,
SLURM_THREADS_PER_CORE, SLURM_DISTRIBUTION, ... each change the shape of a step (srun(1), "INPUT ENVIRONMENT
VARIABLES")."""
_HOSTS = r"(?P<hosts>[\w.,\[\]-]+)"
LOST = re.compile(rf"Task launch for .* failed on node {_HOSTS}: |Node failure on {_HOSTS.replace('hosts', 'others')}")
"""Errors of the node itself: its slurmd, a prolog, the network."""
EXITED = re.compile(rf"error: {_HOSTS}: tasks? [\d,-]+: Exited with exit code")
"""Errors of the task or its container. Tasks that are `Killed` or `Terminated` are only consequences."""
USERS = {"unknown option", "gpus", "memory"}
"""Refusals (`launch.slurm.refusals.TABLE`) that would recur."""


def step(command: Sequence[str], *, nodes: Sequence[str], cpus: int, profile: Profile | None = None,
         folders: Sequence[Path] = (), wait_s: int = 60) -> tuple[list[str], dict[str, str]]:
    """`srun` of a command on each of these nodes: (its arguments, its environment).

    Args:
        command: program and arguments. In a container, the program, a Python, is replaced by the image's.
        nodes: nodes with one task each. Tasks follow Slurm's order, not this one.
        cpus: CPUs per node. Always passed, because srun does not inherit it since 22.05 and its default varies.
        folders: folders that the container mounts in addition to the working directory and the repository.
        wait_s: seconds that other tasks may continue after the first task has ended.
    """
    profile = profile or Profile()
    own = own_variables(profile)
    environment = step_environment(profile)
    mounted = container.mounts(profile, [Path.cwd(), REPOSITORY, *folders])
    # --mpi: a site's default may start a PMI server for every step.
    options = ["--export=ALL", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
               f"--nodelist={','.join(nodes)}", f"--cpus-per-task={cpus}", "--mpi=none", "--kill-on-bad-exit=0",
               f"--wait={wait_s}", *container.step_options(profile.container, mounted, own)]
    return ["srun", *options, *container.inside(profile.container, command, mounted, environment)], environment


def step_environment(profile: Profile | None = None) -> dict[str, str]:
    """The environment for `srun` inside a job, which its tasks inherit. It omits SLURM_EXPORT_ENV: after `sbatch
    --export=NONE`, that would start every step without a PATH."""
    profile = profile or Profile()
    here = {name: value for name, value in envvars.inherited().items()
            if not SLURM.fullmatch(name) or KEPT.fullmatch(name)}
    if profile.container.kind != "none":
        here = container.without_the_host(here)
    own = own_variables(profile)
    return {**here, **own, **container.step_variables(profile.container, own)}


def own_variables(profile: Profile) -> dict[str, str]:
    """Variables that the launcher and the site profile set for the processes of the nodes."""
    search = (str(Path.cwd()), str(REPOSITORY), *(envvars.get("PYTHONPATH") or "").split(":"))
    own = {**profile.environment, "PYTHONPATH": ":".join(dict.fromkeys(filter(None, search)))}
    if profile.interfaces.socket:
        own[envvars.INTERFACE] = profile.interfaces.socket
    if profile.scratch:
        own["TMPDIR"] = profile.scratch
    return own


# ---- errors of srun for a failed step --------------------------------------------------------------------------------


def failed_nodes(text: str) -> tuple[str, ...]:
    """Nodes at fault, in the order of the text; () if there are none."""
    for pattern in (LOST, EXITED):
        found = [node for match in pattern.finditer(text) for hosts in match.groups() if hosts
                 for node in _expanded(hosts)]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def refused(text: str) -> bool:
    """Whether the step was requested wrongly, so that Slurm would refuse it again."""
    return bool(USERS & names(explain("srun", 1, text)))


def _expanded(hosts: str) -> tuple[str, ...]:
    try:
        return hostlist.expand(hosts)
    except UserError:
        return ()
