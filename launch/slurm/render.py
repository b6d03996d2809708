"""Renders the batch script of a job, for any configuration, plan and site profile. Pure.

The script has directives, finds the root, and ends with one `exec`. Everything else happens in Python. The process that
replaces the batch shell receives the signal of `--signal=B:` itself, so the script needs no trap. It has no arithmetic
and no loops.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields

from launch import envvars
from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.plan.plan import ForecastPlan
from launch.slurm.margin import PORTABLE_S
from launch.slurm.profiles import Profile

COMMENT = re.compile(r"megatron-rl:plan:(?P<hash>[0-9a-f]{16})")
VENVS = (".venv-gpu/bin", ".venv/bin")


@dataclass(frozen=True)
class Flags:
    """Command-line options of a submission; None omits an option."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    time: str = "24:00:00"
    exclude: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The options as arguments of `megatron-rl launch`."""
        given = {field.name: getattr(self, field.name) for field in fields(self)
                 if getattr(self, field.name) not in (None, field.default)}
        return tuple(word for name, value in given.items() for word in (f"--{name}", value))


@dataclass(frozen=True)
class Places:
    """Paths in a script. The defaults are for the shipped scripts, which are submitted from the root of the repository,
    wherever that is."""

    root: str | None = None
    """Folder that contains the package `launch`; None: MEGATRON_RL_ROOT, else the folder where sbatch was called."""
    work_dir: str | None = None
    """Working directory of the job; None: the root."""
    python: str | None = None
    """Python interpreter; None: from the repository's environment, else from PATH."""
    output: str = "%x-%j.log"
    """Output file. sbatch does not create its folder; if the folder is missing, the job fails silently."""


def render(config_path: str, words: Sequence[str], config: ResolvedConfig, plan: ForecastPlan, profile: Profile, *,
           flags: Flags = Flags(), places: Places = Places(), margin_s: int = PORTABLE_S,
           plan_hash: str | None = None) -> str:
    """The text of the batch script.

    Args:
        config_path, words: the configuration and its overrides, which the job reads again.
        config, plan: the resolved configuration and its plan.
        margin_s: seconds between the stop signal and the end of the time limit.
        plan_hash: recorded in the job's comment, so that the job notices if its plan differs; None in a script that
            accepts any overrides.

    Raises:
        UserError: an override contains a secret.
    """
    _refuse_secrets(words)
    forecast = plan.forecast
    nodes = forecast.split.training + forecast.split.rollout + config.placement.spare_nodes
    options = [*_options(config, nodes, forecast.cluster.gpus_per_node, profile, flags, places, margin_s),
               *([] if plan_hash is None or "comment" in profile.refuses else [f"--comment={comment_of(plan_hash)}"]),
               *profile.sbatch]
    heading = _heading(config_path, words, config, plan, nodes, flags, places)
    python = shlex.quote(profile.python or places.python or "python3")
    lines = ["#!/bin/bash", *(f"# {line}" for line in heading),
             *(f"#SBATCH {option}" for option in options),
             *_modules(profile), "set -euo pipefail", *_root(places), *_prologue(profile, places), "",
             f"exec {python} -m launch job {shlex.join((config_path, *words))} \"$@\""]
    return "\n".join(lines) + "\n"


def _refuse_secrets(words: Sequence[str]) -> None:
    """Refuse overrides with secrets, because `scontrol show job` shows a job's arguments to every user. Only arguments
    of reward functions have names chosen by the user."""
    for word in words:
        key, _, value = word.partition("=")
        name = key.rpartition(".")[2]
        if "args" in key.split(".") and not value.isdecimal() and envvars.secret(name, value):
            raise UserError(f"{key} holds a secret, but Slurm shows a job's arguments to every user",
                            where=f"override {key}", fix="export it before you submit, and read it in the function "
                            "from its environment")


def comment_of(plan_hash: str) -> str:
    """The job's comment with the plan's hash. It has no equals sign, which separates fields of `scontrol show job`."""
    return f"megatron-rl:plan:{plan_hash}"


def plan_hash_of(comment: str) -> str | None:
    """The hash of the submitted plan, from the job's comment; None if the comment has none."""
    match = COMMENT.search(comment)
    return match["hash"] if match else None


def _options(config: ResolvedConfig, nodes: int, gpus: int, profile: Profile, flags: Flags, places: Places,
             margin_s: int) -> list[str]:
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    asked = {"gpus_per_node": [f"--gpus-per-node={kind}{gpus}"], "gres": [f"--gres=gpu:{kind}{gpus}"], "none": []}
    rows: list[tuple[str, str | None]] = [
        ("job_name", f"--job-name={config.run.name}"),
        ("partition", flags.partition and f"--partition={shlex.quote(flags.partition)}"),
        ("account", flags.account and f"--account={shlex.quote(flags.account)}"),
        ("qos", flags.qos and f"--qos={shlex.quote(flags.qos)}"),
        ("reservation", flags.reservation and f"--reservation={shlex.quote(flags.reservation)}"),
        ("nodes", f"--nodes={nodes}"),
        ("segment", f"--segment={profile.segment}" if profile.segment else None),
        ("exclude", flags.exclude and f"--exclude={shlex.quote(flags.exclude)}"),
        ("ntasks_per_node", "--ntasks-per-node=1"),
        *(("gpus", option) for option in asked[profile.gpus]),
        ("exclusive", "--exclusive"),
        ("mem", "--mem=0"),
        ("time", f"--time={shlex.quote(flags.time)}"),
        ("signal", f"--signal=B:USR1@{margin_s}"),
        ("requeue", "--requeue"),
        ("open_mode", "--open-mode=append"),
        ("dependency", "--dependency=singleton"),
        ("output", f"--output={places.output}")]
    return [option for name, option in rows if option and name not in profile.refuses]


def _root(places: Places) -> list[str]:
    start = shlex.quote(places.root) if places.root else '"${MEGATRON_RL_ROOT:-$SLURM_SUBMIT_DIR}"'
    remedy = ("submit from the root of the repository, or set MEGATRON_RL_ROOT" if places.root is None else
              "the repository has moved: submit again")
    work_dir = shlex.quote(places.work_dir) if places.work_dir else '"$root"'
    return [f"root={start}",
            f'[[ -f "$root/launch/__init__.py" ]] || {_give_up(f"no launch/__init__.py in $root: {remedy}")}',
            f"cd {work_dir}", 'export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"']


def _modules(profile: Profile) -> list[str]:
    """Load the modules before `set -u`, because module functions of many sites fail under it."""
    if not profile.modules:
        return []
    why = "the modules of the site profile cannot be loaded (without a command named module, set modules_init)"
    absent = "modules_init of the site profile cannot be read on this node"
    first = shlex.quote(profile.modules_init) if profile.modules_init else None
    return [*([f"source {first} || {_give_up(absent)}"] if first else []),
            f"module load {shlex.join(profile.modules)} || {_give_up(why)}"]


def _give_up(why: str) -> str:
    return f'{{ echo "{why}" >&2; exit 2; }}'


def _prologue(profile: Profile, places: Places) -> list[str]:
    lines = []
    if profile.python is None and places.python is None:
        lines.append('export PATH="' + "".join(f"$root/{folder}:" for folder in VENVS) + '$PATH"')
    if stamp := profile.stamp():
        lines.append(f"export {envvars.SITE}={stamp}")
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in profile.environment.items()]


def _heading(config_path: str, words: Sequence[str], config: ResolvedConfig, plan: ForecastPlan, nodes: int,
             flags: Flags, places: Places) -> list[str]:
    cluster = plan.forecast.cluster
    spares = f", {config.placement.spare_nodes} of them spare" if config.placement.spare_nodes else ""
    what = f"{config.run.name}: {nodes} nodes x {cluster.gpus_per_node} {cluster.gpu}{spares}"
    if places.root is None:
        return [f"{what}. Submit it from the root of the repository; words after the script's name are",
                "overrides: sbatch FILE run.steps=500 trainer.tp=8. For another site or plan: megatron-rl launch"]
    command = shlex.join(("megatron-rl", "launch", config_path, *words, "--on", "slurm", *flags.words))
    return [f"{what}, by", "  " + command.replace("\n", "\\n")]
