"""Arguments and options that several verbs share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

Device = Literal["auto", "cpu", "gpu"]

if TYPE_CHECKING:
    from launch.cluster.spec import ClusterSpec


def _is_no_override(context: click.Context, argument: click.Parameter, value: str | None) -> str | None:
    """Reject an override in the place of CONFIG, as in `megatron-rl plan trainer.tp=2`."""
    from pathlib import Path

    if value is not None and "=" in value and not Path(value).exists():
        raise click.UsageError(f"name a configuration first: {context.command_path} configs/70b/grpo.yaml {value}")
    return value


config = click.argument("config", type=click.Path(), metavar="CONFIG", callback=_is_no_override)
optional_config = click.argument("config", type=click.Path(), metavar="[CONFIG]", required=False,
                                 callback=_is_no_override)
overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


def config_and_overrides(function: Callable) -> Callable:
    """CONFIG and any number of KEY=VALUE words. Options may appear between them."""
    return config(overrides(function))


device = click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True,
                      help="Device to compute on; auto uses the GPU if there is one and the GPU stack is installed.")
runs_folder = click.option("--dir", "folder", metavar="DIR", default="runs", show_default=True,
                           help="Folder that holds all runs (run.dir).")
attempt = click.option("--attempt", type=click.IntRange(min=1), help="Attempt to read.  [default: the newest]")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@dataclass(frozen=True)
class PlannedFor:
    """The cluster and throughput to plan for, as far as the command line sets them."""

    cluster_file: str | None
    from_slurm: bool
    partition: str | None
    nodelist: str | None
    gpu: str | None
    target: str | None

    def overrides(self) -> tuple[str, ...]:
        """These options as overrides of the configuration."""
        words: tuple[str, ...] = ()
        if self.target is not None:
            words = (*words, f"workload.target_prompts_per_hour={_rate(self.target)}")
        if self.cluster_file is not None and not self.from_slurm:
            words = (*words, f"cluster={self.cluster_file}")
        return words

    def spec(self, config: str, overrides: tuple[str, ...]) -> ClusterSpec | None:
        """The nodes that Slurm has now; None without --from-slurm."""
        if not self.from_slurm:
            return None
        from launch.cluster.file import load_cluster
        from launch.config.load import load_config
        from launch.slurm.client import Slurm
        from launch.slurm.live_cluster import read_cluster

        named = self.cluster_file or load_config(config, overrides).config.cluster
        base = None if named == "local" else load_cluster(named)
        return read_cluster(Slurm(), partition=self.partition, nodelist=self.nodelist, gpu=self.gpu, base=base,
                            base_file=named)


def planned_for(function: Callable) -> Callable:
    """Add --cluster, --target and --from-slurm with its three options, passed to the verb as one `planned_for`."""
    @functools.wraps(function)
    def with_one(*arguments: Any, cluster_file: str | None, from_slurm: bool, partition: str | None,
                 nodelist: str | None, gpu: str | None, target: str | None, **rest: Any) -> Any:
        for option, value in (("--partition", partition), ("--nodelist", nodelist), ("--gpu", gpu)):
            if value is not None and not from_slurm:
                raise click.UsageError(f"{option} selects among Slurm's nodes: add --from-slurm")
        wanted = PlannedFor(cluster_file, from_slurm, partition, nodelist, gpu, target)
        return function(*arguments, planned_for=wanted, **rest)

    for option in reversed((
            click.option("--cluster", "cluster_file", metavar="FILE",
                         help="Plan for this cluster file instead of the configuration's."),
            click.option("--from-slurm", is_flag=True,
                         help="Plan for the nodes that Slurm has now (scontrol). Slurm does not know NICs and rails; "
                              "a cluster file supplies them."),
            click.option("--partition", metavar="NAME", help="With --from-slurm: only nodes of this partition."),
            click.option("--nodelist", metavar="LIST",
                         help="With --from-slurm: only these nodes, such as node[001-032]."),
            click.option("--gpu", metavar="KIND", help="With --from-slurm: only nodes with this kind of GPU."),
            click.option("--target", metavar="RATE", help="Prompts per hour to reach, such as 10000/h."))):
        with_one = option(with_one)
    return with_one


def _rate(text: str) -> float:
    from launch.errors import UserError

    number = text.removesuffix("/h").replace("_", "").replace(",", "")
    try:
        rate = float(number)
    except ValueError:
        rate = float("nan")
    if not 0 < rate < float("inf"):
        raise UserError(f"--target {text} is not a rate", where="--target", fix="use prompts per hour, such as 10000/h")
    return rate
