"""The configuration files of a simulated Slurm, as text. Pure but for the search of free ports."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.patience import patient

PORTS = range(8320, 12288)
"""Below the kernel's ephemeral ports, which outgoing connections take, and below the blocks of our jobs
(`launch.ports`), of which 32 simulated nodes on one host leave few."""
BLOCK = 64
_CLAIMS: list[socket.socket] = []
"""Held until this process ends."""


@dataclass(frozen=True)
class Group:
    """Nodes of one kind: `prefix-001` ... with GPUs that Slurm believes in."""

    prefix: str
    count: int
    gpu: str | None = "h100"
    """Type in the gres; None gives nodes without GPUs."""
    gpus: int = 8
    partition: str = "batch"
    listed: tuple[str, ...] = ()
    """Names of another form, `count` of them, such as `r1n01` or `gpu-001-ib0`."""

    @property
    def names(self) -> list[str]:
        return list(self.listed) or [f"{self.prefix}-{number:03d}" for number in range(1, self.count + 1)]

    @property
    def hostlist(self) -> str:
        return ",".join(self.listed) or f"{self.prefix}-[001-{self.count:03d}]"

    @property
    def gres(self) -> str:
        return f"gpu:{self.gpu}:{self.gpus}"


def gres_conf(groups: Sequence[Group], devices: Path) -> str:
    return "".join(f"NodeName={group.hostlist} Name=gpu Type={group.gpu} File={devices}/nvidia[0-{group.gpus - 1}]\n"
                   for group in groups if group.gpu)


def slurm_conf(folder: Path, groups: Sequence[Group], *, tree: bool, settings: str = "") -> str:
    """slurm.conf of a cluster whose nodes all are this machine.

    Args:
        folder: where its daemons keep their files.
        tree: whether there is a topology.conf.
        settings: further lines; a name that is also set here counts as given there.
    """
    me, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname().split(".")[0]
    port = free_block(sum(group.count for group in groups) + 1)
    values = {
        "ClusterName": "sim", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmctldPort": str(port),
        "SlurmUser": me, "SlurmdUser": me,
        # cred_expire: a requeued job starts again after 6 s, not after two minutes
        "AuthType": "auth/munge", "AuthInfo": f"socket={folder}/munge/socket,cred_expire=5", "CredType": "cred/munge",
        "StateSaveLocation": f"{folder}/state", "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/spool/slurmctld.pid", "SlurmdPidFile": f"{folder}/spool/%n.pid",
        "PlugStackConfig": f"{folder}/etc/plugstack.conf", "MailProg": "/bin/true",
        "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none", "AccountingStorageType": "accounting_storage/none",
        "MpiDefault": "none", "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core", "GresTypes": "gpu",
        "TopologyPlugin": f"topology/{'tree' if tree else 'none'}", "SlurmdParameters": "config_overrides",
        "ReturnToService": "1", "JobRequeue": "1", "EnforcePartLimits": "ALL", "KillWait": "5",
        "MinJobAge": "3600",    # there is no accounting: finished jobs stay visible to scontrol
        "SlurmdTimeout": f"{patient(10):.0f}",      # later than `run.node_silent_s` of the tests, which scales too
        "SchedulerParameters": "bf_interval=1,sched_interval=2,sched_min_interval=100000"}
    given = {line.partition("=")[0].lower() for line in settings.splitlines()}
    lines = [f"{name}={value}" for name, value in values.items() if name.lower() not in given] + [settings]
    first = port + 1
    for group in groups:
        gres = f" Gres={group.gres}" if group.gpu else ""
        lines.append(f"NodeName={group.hostlist} NodeHostname={host} NodeAddr=127.0.0.1 "
                     f"Port=[{first}-{first + group.count - 1}] Sockets=2 CoresPerSocket=48 ThreadsPerCore=1 "
                     f"RealMemory=2000000{gres} State=UNKNOWN")
        first += group.count
    for number, partition in enumerate(dict.fromkeys(group.partition for group in groups)):
        nodes = ",".join(group.hostlist for group in groups if group.partition == partition)
        lines.append(f"PartitionName={partition} Nodes={nodes} Default={'NO' if number else 'YES'} "
                     "DefaultTime=30:00 MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def free_block(size: int) -> int:
    """First of `size` neighbouring TCP ports that nobody uses, ours until this process ends.

    Blocks begin at multiples of `BLOCK`, and the port before a block is held as long as we live: another cluster that
    starts at this moment, before our daemons have bound theirs, goes on to the next.
    """
    span = -(-(size + 1) // BLOCK) * BLOCK
    starts = list(PORTS)[::BLOCK]
    shift = os.getpid() % len(starts)
    for base in starts[shift:] + starts[:shift]:
        if base + span > PORTS.stop or not (claims := _claim(base, span)):
            continue
        if _all_free(range(base, base + span), but={base + step for step in range(0, span, BLOCK)}):
            _CLAIMS.extend(claims)
            return base + 1
        for each in claims:
            each.close()
    raise AssertionError(f"no {size} free ports in a row between {PORTS.start} and {PORTS.stop}")


def _claim(base: int, span: int) -> list[socket.socket]:
    """The first port of every block in the span, bound; [] if one is taken."""
    held: list[socket.socket] = []
    for step in range(0, span, BLOCK):
        held.append(socket.socket())
        try:
            held[-1].bind(("0.0.0.0", base + step))
        except OSError:
            for each in held:
                each.close()
            return []
    return held


def _all_free(ports: range, but: set[int]) -> bool:
    for port in ports:
        with socket.socket() as probe:
            try:
                if port not in but:
                    probe.bind(("0.0.0.0", port))
            except OSError:
                return False
    return True
