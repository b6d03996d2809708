"""Site profiles, `slurm/profiles/*.yaml`: what differs between sites once a job has started, and which options of
sbatch a site refuses. Account, partition, QOS and reservation are flags of the command."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from launch import envvars
from launch.config import typed_file, yaml_file
from launch.config.problems import Problems

KIND, EXAMPLE = "site profile", "slurm/profiles/default.yaml"
Option = Literal["exclusive", "mem", "requeue", "signal", "dependency", "comment", "open_mode", "ntasks_per_node"]
Figure = Annotated[float, Gt(0), Le(1e9)]


IN_THE_SCRIPT = ("modules", "modules_init", "python", "gpus", "gpu_type", "refuses", "segment", "sbatch")
"""Keys of a profile that only the batch script can obey."""


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():      # a line break would become a line of the batch script
        raise ValueError("one line of text")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)


class Container(Section):
    kind: Literal["none", "pyxis", "enroot", "apptainer"] = "none"
    """How the processes of a node are put into a container: by Slurm's plug-in pyxis, by `enroot start`, by
    `apptainer exec`, or not at all. The leader of the job stays outside: it needs `srun`."""
    image: Line | None = None
    """pyxis: an image or a .sqsh file; enroot: the name of a container that exists on each node; apptainer: a .sif
    file."""
    mounts: list[Line] = []
    """`HOST:CONTAINER` or `PATH`, beside what is always mounted: the working directory, the repository, the run's
    folder, those of the model and the data, and `scratch` (/tmp without one)."""
    python: Line = "python3"
    """The Python inside the image."""


class Interfaces(Section):
    socket: Line | None = None
    """Interface at which the processes of a job meet (gloo, NCCL's bootstrap, Ray), such as `bond0`; null: that of
    the node's address."""
    nccl: list[Line] = []
    """NICs for NCCL in rail order, such as `mlx5_0`; empty: those that the preflight
    finds beside the GPUs."""


class Profile(Section):
    container: Container = Container()
    """What the processes of a node run in."""
    modules: list[Line] = []
    """Loaded by the batch script (`module load ...`)."""
    modules_init: Line | None = None
    """File that the batch script sources first, where a batch shell has no `module`: /etc/profile.d/modules.sh,
    /etc/profile.d/lmod.sh or /usr/share/lmod/lmod/init/bash; null: none."""
    python: Line | None = None
    """The Python of the leader, and of the nodes where there is no container. null: .venv-gpu or .venv of the
    repository if they are there, else `python3` of PATH; `megatron-rl launch` takes its own."""
    environment: dict[Name, Line] = {}
    """Variables of every process of the job. No secrets: they would stand in the batch script; export those before
    the submission."""
    scratch: Line | None = None
    """Folder on each node's own disk for Ray, caches of compilers and temporary files, TMPDIR of every process; null:
    the job's TMPDIR, else /tmp. At most 60 bytes; beyond 26, Ray takes a folder in /tmp, since a socket's path has
    107."""
    interfaces: Interfaces = Interfaces()
    """Network interfaces, where the guess would be wrong."""
    gpus: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """How GPUs are asked for: --gpus-per-node=8, --gres=gpu:8, or not at all (nodes are given whole)."""
    gpu_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    """Type in the request, where the site wants one: gpu:h100:8."""
    refuses: list[Option] = []
    """Options of sbatch that the site refuses; the batch script leaves them out."""
    segment: Annotated[int, Gt(0)] | None = None
    """--segment, nodes that must lie in one block (topology/block only)."""
    sbatch: list[Annotated[str, Field(pattern=r"^--[a-z][ -~]*$")]] = []
    """Further options of sbatch, such as `--constraint=ib`."""
    stop_margin_s: Figure | None = None
    """Least seconds between the stop signal and the end of the time limit; null: what the plan needs."""
    file_system_gb_per_s: Figure | None = None
    """Rate at which all training nodes together write a checkpoint, in GB/s of 1e9 bytes; null: the cluster file's
    coefficient."""

    def stamp(self) -> str:
        """Of what the batch script holds of this profile; "" of a profile that changes nothing in it."""
        told = {name: getattr(self, name) for name in self._in_the_script()}
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16] if told else ""

    def too_late(self, stamp: str) -> tuple[str, ...]:
        """Keys that have no effect in a job whose script was written with another profile, or none (its stamp)."""
        return self._in_the_script() if stamp != self.stamp() else ()

    def _in_the_script(self) -> tuple[str, ...]:
        return tuple(name for name in IN_THE_SCRIPT if getattr(self, name) != type(self).model_fields[name].default)


def load_profile(path: str | os.PathLike[str] | None) -> Profile:
    """Read and check a site profile; None gives the defaults.

    Raises:
        UserError: no such file, unknown keys (with the nearest valid one), values of the wrong type, a container
            without an image.
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
            problems.add(f"environment.{name} holds a secret, and everything here is written into batch scripts and "
                         "records", where=typed_file.line_of(document, file, ("environment", name)),
                         fix=f"remove it, and export {name} before you submit: sbatch hands your environment on")
    problems.raise_if_any()
    return profile
