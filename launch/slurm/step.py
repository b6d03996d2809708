"""The one step of a job: one task a node, with everything that the node has, inside the site's container if it uses
one; and what `srun` says where it fails. Pure but for the working directory and this process's environment."""

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
"""Slurm's variables that say which job this is and where its controller is, but no option of `srun`. A list of what to
leave out would be long and grow with every version: SLURM_HINT, SLURM_EXACT, SLURM_OVERCOMMIT, SLURM_CPU_BIND,
SLURM_MPI_TYPE, SLURM_THREADS_PER_CORE, SLURM_DISTRIBUTION, ... each changes the shape of a step (srun(1), "INPUT
ENVIRONMENT VARIABLES")."""
_HOSTS = r"(?P<hosts>[\w.,\[\]-]+)"
LOST = re.compile(rf"Task launch for .* failed on node {_HOSTS}: |Node failure on {_HOSTS.replace('hosts', 'others')}")
"""The node itself: its slurmd, a prolog, the network."""
EXITED = re.compile(rf"error: {_HOSTS}: tasks? [\d,-]+: Exited with exit code")
"""The task, or the container it was to run in. Tasks that are `Killed` or `Terminated` only follow."""
USERS = {"unknown option", "gpus", "memory"}
"""Refusals (`launch.slurm.refusals.TABLE`) that would be the same the next time."""


def step(command: Sequence[str], *, nodes: Sequence[str], cpus: int, profile: Profile | None = None,
         folders: Sequence[Path] = (), wait_s: int = 60) -> tuple[list[str], dict[str, str]]:
    """`srun` of a command on each of these nodes: (its words, its environment).

    Args:
        command: program and words. In a container the program, a Python, becomes that of the image.
        nodes: one task each; tasks follow Slurm's order, not this one.
        cpus: of a node. Passed always: srun does not inherit it (22.05 on), and what it takes instead differs by job.
        folders: what the container must see beside the working directory and the repository.
        wait_s: how long the others may go on when the first task has ended.
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
    """The environment for `srun` inside a job, which its tasks inherit. `sbatch --export=NONE` leaves SLURM_EXPORT_ENV
    behind, with which every step would start without a PATH."""
    profile = profile or Profile()
    here = {name: value for name, value in envvars.inherited().items()
            if not SLURM.fullmatch(name) or KEPT.fullmatch(name)}
    if profile.container.kind != "none":
        here = container.without_the_host(here)
    own = own_variables(profile)
    return {**here, **own, **container.step_variables(profile.container, own)}


def own_variables(profile: Profile) -> dict[str, str]:
    """What the launcher and the site profile set for the processes of the nodes."""
    search = (str(Path.cwd()), str(REPOSITORY), *(envvars.get("PYTHONPATH") or "").split(":"))
    own = {**profile.environment, "PYTHONPATH": ":".join(dict.fromkeys(filter(None, search)))}
    if profile.interfaces.socket:
        own[envvars.INTERFACE] = profile.interfaces.socket
    if profile.scratch:
        own["TMPDIR"] = profile.scratch
    return own


# ---- what srun says of a step that has failed ------------------------------------------------------------------------


def failed_nodes(text: str) -> tuple[str, ...]:
    """Nodes that are at fault, in the order in which they are named; () where none is."""
    for pattern in (LOST, EXITED):
        found = [node for match in pattern.finditer(text) for hosts in match.groups() if hosts
                 for node in _expanded(hosts)]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def refused(text: str) -> bool:
    """Whether Slurm would refuse this step again: it was asked for wrongly."""
    return bool(USERS & names(explain("srun", 1, text)))


def _expanded(hosts: str) -> tuple[str, ...]:
    try:
        return hostlist.expand(hosts)
    except UserError:
        return ()
