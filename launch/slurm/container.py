"""Runs the command of a node in the site's container, with Slurm's plug-in pyxis, enroot or apptainer. Pure except for
the working directory.

They pass on different parts of the host's environment. pyxis passes everything, but the image's variables win unless
they are listed (`--container-env`). apptainer passes almost everything, and `APPTAINERENV_X` overrides the image's X.
enroot passes only the listed variables (`--env`), not even Slurm's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launch.config.schema import RunConfig
from launch.slurm.profiles import Container, Profile

OF_THE_HOST = re.compile(r"LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CPATH|(C|CPLUS)_INCLUDE_PATH|PKG_CONFIG_PATH|"
                         r"CMAKE_PREFIX_PATH|MANPATH|INFOPATH|PYTHONHOME|VIRTUAL_ENV\w*|CONDA_\w*|_CE_\w*|"
                         r"LOADEDMODULES|_LMFILES_\w*|MODULE\w*|LMOD_\w*|_ModuleTable\w*|__LMOD\w*|BASH_\w*%*\S*|"
                         r"TMPDIR|TMP|TEMP")
"""Software and folders of the host, mainly of loaded modules, which are wrong inside an image."""
OF_THE_IMAGE = re.compile(r"PATH|HOME|PWD|OLDPWD|SHELL|SHLVL|HOSTNAME|TERM|_|XDG_\w*|ENROOT_\w*|LANG|LC_\w*")
"""Variables that the image or enroot sets itself. `srun` and the container runtime still need the host's values."""
OF_A_TASK = ("SLURMD_NODENAME", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID",
             "CUDA_VISIBLE_DEVICES", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")
"""Variables that Slurm sets for each task of a step; the last three only with GPUs and a topology."""
CHANGE_FOLDER = ("/bin/sh", "-c", 'cd "$1" && shift && exec "$@"', "sh")
"""enroot has no option for the working directory."""


def without_the_host(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a container."""
    return {name: value for name, value in environment.items() if not OF_THE_HOST.fullmatch(name)}


def step_options(container: Container, mounted: Sequence[str], own: Iterable[str]) -> list[str]:
    """Options of `srun`, for pyxis.

    Args:
        own: variables that override those of the image.
    """
    if container.kind != "pyxis":
        return []
    return [f"--container-image={container.image}", f"--container-mounts={','.join(mounted)}",
            f"--container-workdir={Path.cwd()}", f"--container-env={','.join(sorted(own))}"]


def step_variables(container: Container, own: Mapping[str, str]) -> dict[str, str]:
    """Additional variables for `srun`, for apptainer."""
    return {f"APPTAINERENV_{name}": value for name, value in own.items()} if container.kind == "apptainer" else {}


def inside(container: Container, command: Sequence[str], mounted: Sequence[str],
           environment: Mapping[str, str]) -> list[str]:
    """The command on a node: wrapped for enroot and apptainer, and with the image's Python in a container.

    Args:
        environment: environment of `srun`, which its tasks inherit.
    """
    if container.kind == "none":
        return list(command)
    words = [container.python, *command[1:]]
    if container.kind == "pyxis":
        return words
    if container.kind == "enroot":
        return ["enroot", "start", "--rw", *_each("--mount", mounted), *_each("--env", _handed_on(environment)),
                str(container.image), *CHANGE_FOLDER, str(Path.cwd()), *words]
    return ["apptainer", "exec", "--nv", *_each("--bind", mounted), "--pwd", str(Path.cwd()), str(container.image),
            *words]


def mounts(profile: Profile, folders: Sequence[Path] = ()) -> list[str]:
    """`HOST:CONTAINER` of every mount, without duplicates, those of the job first. Omits mounts inside another one."""
    own = sorted({folder.resolve() for folder in (*folders, Path(profile.scratch or "/tmp"))})
    outer = [folder for folder in own if not any(folder != other and folder.is_relative_to(other) for other in own)]
    return list(dict.fromkeys(each if ":" in each else f"{each}:{each}"
                              for each in (*map(str, outer), *profile.container.mounts)))


def folders_of(config: RunConfig) -> list[Path]:
    """Folders of the models and the data that the nodes' processes read."""
    teacher = config.algorithm.distillation.teacher
    models = [Path(name) for name in (config.model.path, teacher) if name is not None]
    files = [Path(name) for name in (config.data.train, config.data.eval) if name is not None]
    return [folder for folder in (*models, *(file.parent for file in files)) if folder.is_dir()]


def _handed_on(environment: Mapping[str, str]) -> list[str]:
    """Names without values, because every user can read a command line. enroot supports only single-line values."""
    names = {name for name, value in environment.items() if re.fullmatch(r"[A-Za-z_]\w*", name) and "\n" not in value}
    given = {name for name in OF_A_TASK if name in environment or name not in OF_A_TASK[-3:]}
    return sorted(name for name in names | given if not OF_THE_IMAGE.fullmatch(name))


def _each(option: str, values: Iterable[str]) -> list[str]:
    return [part for value in values for part in (option, value)]
