"""Site profiles, `slurm/profiles/*.yaml`: differences between sites inside a job, and sbatch options that a site
refuses. Account, partition, QOS and reservation are command-line flags."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import AfterValidator, Field

from launch import envvars
from launch.config import typed_file, yaml_file
from launch.config.schema import Section
from launch.errors import Problems

KIND, EXAMPLE = "site profile", "slurm/profiles/default.yaml"
Option = Literal["exclusive", "mem", "requeue", "signal", "dependency", "comment", "open_mode", "ntasks_per_node"]
Figure = Annotated[float, Gt(0), Le(1e9)]


IN_THE_SCRIPT = ("modules", "modules_init", "python", "gpus", "gpu_type", "refuses", "segment", "sbatch")
"""Keys of a profile that only affect the batch script."""


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():      # a line break would become a line of the batch script
        raise ValueError("one line of text")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Container(Section):
    kind: Literal["none", "pyxis", "enroot", "apptainer"] = "none"
    """Container runtime of the node's processes. The job's leader stays outside, since it needs `srun`."""
    image: Line | None = None
    """pyxis: an image or a .sqsh file. enroot: a container that exists on each node. apptainer: a .sif file."""
    mounts: list[Line] = []
    """Additional mounts, `HOST:CONTAINER` or `PATH`. Always mounted: the working directory, the repository, the folders
    of run, model and data, and `scratch` (else /tmp)."""
    python: Line = "python3"
    """Python inside the image."""


class Interfaces(Section):
    socket: Line | None = None
    """Interface for gloo, NCCL's bootstrap and Ray, such as `bond0`; null: the interface of the node's address."""
    nccl: list[Line] = []
    """NICs for NCCL in rail order, such as `mlx5_0`; empty: the NICs that the preflight finds next to the GPUs."""


class Profile(Section):
    container: Container = Container()
    """Container of the node's processes."""
    modules: list[Line] = []
    """Modules that the batch script loads."""
    modules_init: Line | None = None
    """File that the batch script sources first if a batch shell has no `module`, such as /etc/profile.d/lmod.sh."""
    python: Line | None = None
    """Python of the leader, and of nodes without a container. null: `.venv-gpu` or `.venv` of the repository, else
    `python3`; `megatron-rl launch` uses its own."""
    environment: dict[Name, Line] = {}
    """Environment variables of every process of the job. Not for secrets: export those before submitting."""
    scratch: Line | None = None
    """Folder on each node's local disk for Ray, compiler caches and temporary files (TMPDIR); null: the job's TMPDIR,
    else /tmp. At most 60 bytes; beyond 26, Ray uses /tmp because of the length limit of socket paths."""
    interfaces: Interfaces = Interfaces()
    """Network interfaces, if the detected ones are wrong."""
    gpus: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """How GPUs are requested: --gpus-per-node=8, --gres=gpu:8, or not at all."""
    gpu_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    """GPU type in the request, as in gpu:h100:8."""
    refuses: list[Option] = []
    """sbatch options that the site refuses; the batch script omits them."""
    segment: Annotated[int, Gt(0)] | None = None
    """--segment: nodes that must share a block (topology/block only)."""
    sbatch: list[Annotated[str, Field(pattern=r"^--[a-z][ -~]*$")]] = []
    """Additional sbatch options, such as `--constraint=ib`."""
    stop_margin_s: Figure | None = None
    """Minimum seconds between the stop signal and the time limit; null: what the plan needs."""
    file_system_gb_per_s: Figure | None = None
    """Rate at which all training nodes together write a checkpoint, in GB/s (1e9 bytes); null: the cluster file's
    coefficient."""

    def stamp(self) -> str:
        """Hash of this profile's keys in the batch script; "" if the profile changes nothing in it."""
        told = {name: getattr(self, name) for name in self._in_the_script()}
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16] if told else ""

    def too_late(self, stamp: str) -> tuple[str, ...]:
        """Keys without effect in a job whose script was written with another profile or none, which has this stamp."""
        return self._in_the_script() if stamp != self.stamp() else ()

    def _in_the_script(self) -> tuple[str, ...]:
        return tuple(name for name in IN_THE_SCRIPT if getattr(self, name) != type(self).model_fields[name].default)


def load_profile(path: str | os.PathLike[str] | None) -> Profile:
    """Read and check a site profile; None gives the defaults.

    Raises:
        UserError: the file is missing, a key is unknown (with the nearest valid one), a value has the wrong type, or a
            container has no image.
    """
    if path is None:
        return Profile()
    file = os.fspath(path)
    return parse_profile(typed_file.read_text(file, KIND, EXAMPLE), file)


def parse_profile(text: str, file: str) -> Profile:
    """As `load_profile`, for the text of a file named `file`."""
    document = yaml_file.parse(text, file)
    profile = typed_file.validated(Profile, document, file, KIND, EXAMPLE)
    problems, container = Problems(file), profile.container
    if container.kind != "none" and container.image is None:
        problems.add(f"container.kind = {container.kind} without container.image",
                     where=typed_file.line_of(document, file, ("container", "kind")),
                     fix="add container.image, or set container.kind: none")
    if container.kind == "none" and (container.image is not None or container.mounts):
        problems.add("container.image and container.mounts have no effect with container.kind = none",
                     where=typed_file.line_of(document, file, ("container",)),
                     fix="set container.kind: pyxis, enroot or apptainer")
    if profile.gpu_type is not None and profile.gpus == "none":
        problems.add("gpu_type has no effect with gpus = none",
                     where=typed_file.line_of(document, file, ("gpu_type",)), fix="remove it, or set gpus: gres")
    if profile.modules_init is not None and not profile.modules:
        problems.add("modules_init has no effect without modules",
                     where=typed_file.line_of(document, file, ("modules_init",)), fix="remove it, or name modules")
    for name, value in profile.environment.items():
        if envvars.secret(name, value):
            problems.add(f"environment.{name} holds a secret, but the profile is written into batch scripts and "
                         "records", where=typed_file.line_of(document, file, ("environment", name)),
                         fix=f"remove it, and export {name} before you submit: sbatch passes your environment on")
    problems.raise_if_any()
    return profile
