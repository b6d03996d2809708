"""What a job expects of each node. The leader writes it, and the supervisors check their nodes against it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from launch import envvars
from launch.cluster.spec import ClusterSpec
from launch.config.schema import RunConfig
from launch.files.shared import write_atomically
from launch.slurm.profiles import Profile

FILE = "expected.json"
LIBRARIES = ("torch", "vllm", "megatron-core", "ray", "transformers")
GIB = 1024 ** 3


@dataclass(frozen=True)
class Expected:
    """Expected figures of one node. None or 0 means that the figure is not checked."""

    device: envvars.Device = "gpu"
    gpus: int = 0
    gpu_kind: str | None = None
    """A row of `launch.cluster.gpus`, such as `H100-SXM-80GB`."""
    nics: int = 0
    nic_gbit_per_s: float = 0.0
    nic_names: tuple[str, ...] = ()
    """NICs of the rails, from the site profile; () if they are detected."""
    nvlink: bool = False
    """Whether NVLink connects the GPUs of a node."""
    cpus: int = 0
    """Cores that the supervisor's processes may use."""
    reward_processes: int = 0
    """Reward processes of a node that trains."""
    model: str | None = None
    """Model folder that every node reads; None if the job reads none."""
    model_weights: bool = True
    """Whether the weights are read, not only the configuration and the tokenizer."""
    teacher: str | None = None
    """Folder of the teacher (`algorithm.distillation`), if there is one."""
    libraries: tuple[str, ...] = ()
    """Distributions that the workload imports."""
    scratch: str | None = None
    """Folder for Ray's session and spilled objects; None: TMPDIR, else /tmp."""
    scratch_bytes: int = 10 * GIB
    shm_bytes: int = 2 * GIB
    port_base: int | None = None
    """First port of the block that the job uses on every node; None: the first free block."""
    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    """Partition -> communication variables that the launcher sets for its processes."""

    def write(self, attempt_folder: Path) -> None:
        write_atomically(attempt_folder / FILE, json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(attempt_folder: Path) -> Expected:
        return TypeAdapter(Expected).validate_json((attempt_folder / FILE).read_text(encoding="utf-8"))


def expected_of(config: RunConfig, cluster: ClusterSpec | None, device: envvars.Device = "gpu", *,
                profile: Profile, computes: bool = True, cpus: int = 0) -> Expected:
    """What `config` expects of a node of `cluster`.

    Args:
        cluster: None if only this machine is known. GPUs, NICs and NVLink are then not checked.
        profile: the site profile, for the NICs that NCCL uses and the folder on each node's local disk.
        computes: whether the workload loads the model (training). A rehearsal needs neither libraries nor weights.
        cpus: cores requested from Slurm on each node; 0: not checked.
    """
    variables = {role: {name: value for name, value in envvars.environment(role, device, config, job="").items()
                        if name.startswith("NCCL_") and name != "NCCL_SOCKET_IFNAME"}
                 for role in ("trainer", "rollout")}
    common = Expected(device=device, cpus=cpus, reward_processes=config.reward.workers if computes else 0,
                      scratch=profile.scratch, libraries=LIBRARIES if computes else (),
                      model=config.model.path if computes else None, model_weights=config.model.init == "load",
                      teacher=config.algorithm.distillation.teacher if computes else None,
                      port_base=config.run.port_base,
                      environment={"training": variables["trainer"], "rollout": variables["rollout"]})
    if cluster is None or device == "cpu":
        return common
    return Expected(**{**vars(common), "gpus": cluster.gpus_per_node, "gpu_kind": cluster.gpu.name,
                       "nics": cluster.nics_per_node, "nic_gbit_per_s": cluster.nic_bandwidth * 8 / 1e9,
                       "nic_names": tuple(profile.interfaces.nccl),
                       "nvlink": cluster.gpus_per_node > 1 and cluster.gpu.nvlink_bandwidth > 0})
