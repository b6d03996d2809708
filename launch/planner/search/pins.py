"""What a configuration pins, checked against model and cluster before anything is searched: a size that no plan can have
is a mistake in the input, with a message of its own, and not "nothing fits"."""

from __future__ import annotations

from math import prod

from launch.cluster.spec import ClusterSpec
from launch.config import auto
from launch.config.checks import check, divisors
from launch.config.load import LoadedConfig
from launch.config.problems import Problems
from launch.model.architecture import Architecture
from launch.planner.search.problem import token_budget


def check_pins(loaded: LoadedConfig, architecture: Architecture, cluster: ClusterSpec) -> None:
    """Refuse pinned sizes that contradict each other, the cluster or the model. Raises UserError showing all of them."""
    checker = _Checker(loaded, cluster)
    checker.modes()
    checker.nodes()
    checker.tensor_parallel()
    checker.gpus()
    checker.problems.raise_if_any()
    check(_least(loaded, architecture, cluster), architecture, "gpu")


def _least(loaded: LoadedConfig, architecture: Architecture, cluster: ClusterSpec) -> LoadedConfig:
    """With open keys at the values that ask least of the model, so that only what is pinned can be wrong."""
    config = loaded.config
    values = auto.local_values(config)
    trainer = config.trainer
    if trainer.token_budget == "auto":
        values["trainer.token_budget"] = token_budget(config, cluster)
    if trainer.sequence_parallel == "auto":
        values["trainer.sequence_parallel"] = trainer.tp != "auto" and trainer.tp > 1
    elif trainer.sequence_parallel and trainer.tp == "auto":
        values["trainer.tp"] = 2            # the search takes TP > 1 only
    if trainer.pp == "auto" and trainer.vpp != "auto" and trainer.vpp > 1:
        fitting = (pp for pp in range(2, architecture.layers + 1) if architecture.layers % (pp * trainer.vpp) == 0)
        values["trainer.pp"] = next(fitting, 2)
    return loaded.with_values(values, "auto")


class _Checker:
    def __init__(self, loaded: LoadedConfig, cluster: ClusterSpec) -> None:
        self.loaded, self.config, self.cluster = loaded, loaded.config, cluster
        self.problems = Problems(loaded.path)

    def add(self, what: str, *keys: str, fix: str) -> None:
        self.problems.add(what, where=self.loaded.where(*keys), fix=fix)

    def pin(self, key: str) -> int | None:
        """The value of a key; None where it is open."""
        value = auto.value(self.config, key)
        return None if value == "auto" else value

    def modes(self) -> None:
        mode, algorithm = self.config.placement.mode, self.config.algorithm
        if mode in ("colocated", "hybrid") and algorithm.asynchronous:
            self.add(f"placement.mode = {mode} with algorithm.asynchronous = true: trainer and engines take turns on the "
                     "same GPUs", "placement.mode", "algorithm.asynchronous",
                     fix="use algorithm.asynchronous=false, or placement.mode=disaggregated")
        if mode == "disaggregated" and algorithm.asynchronous and algorithm.max_staleness == 0:
            self.add("algorithm.max_staleness = 0 with algorithm.asynchronous = true: generation that goes on during an "
                     "update gives samples at least one version old", "algorithm.max_staleness",
                     "algorithm.asynchronous", fix="use algorithm.max_staleness >= 1, or algorithm.asynchronous=false")

    def nodes(self) -> None:
        placement, have, training = self.config.placement, len(self.cluster.nodes), self.pin("placement.training_nodes")
        if placement.spare_nodes >= have:
            self.add(f"placement.spare_nodes = {placement.spare_nodes} leaves none of the cluster's {have} nodes",
                     "placement.spare_nodes", "cluster", fix=f"use placement.spare_nodes <= {have - 1}")
        elif training is not None and placement.mode == "disaggregated":
            left = have - placement.spare_nodes
            spare = f", {placement.spare_nodes} of them spare" if placement.spare_nodes else ""
            what = f"placement.training_nodes = {training} leaves no node for rollout: the cluster has {have}{spare}"
            if have == 1:
                self.add(f"{what}, whose GPUs the two partitions share out", "placement.training_nodes", "cluster",
                         fix="use placement.training_nodes=auto")
            elif training >= left:
                self.add(what, "placement.training_nodes", "cluster",
                         fix=f"use placement.training_nodes <= {left - 1}" if left > 1 else "use a larger cluster")

    def tensor_parallel(self) -> None:
        node, allowed = self.cluster.gpus_per_node, self.config.placement.tp_across_nodes
        for key in ("trainer.tp", "rollout.tp"):
            tp = self.pin(key)
            if tp is not None and node % tp and not (allowed and tp % node == 0):
                whole = f", or whole nodes ({2 * node}, {3 * node}, ...) with placement.tp_across_nodes=true"
                self.add(f"{key} = {tp} does not fit into nodes of {node} GPUs: a TP group stays inside a node", key,
                         "cluster", fix=f"use {key} = {divisors(node)}{whole if tp > node else ''}")

    def gpus(self) -> None:
        have = (len(self.cluster.nodes) - self.config.placement.spare_nodes) * self.cluster.gpus_per_node
        trainer = [key for key in ("trainer.tp", "trainer.pp", "trainer.cp", "trainer.dp") if self.pin(key)]
        rollout = [key for key in ("rollout.replicas", "rollout.tp") if self.pin(key)]
        training, engines = (prod(self.pin(key) or 1 for key in keys) for keys in (trainer, rollout))
        together = self.config.placement.mode != "disaggregated"
        if have <= 0:
            return
        if training + (not together) > have:
            self._too_many(trainer, f"{training} GPUs to train", have, "" if together else ", and some must roll out")
        elif engines + (0 if together else training) > have:
            self._too_many(rollout, f"{engines} GPUs to roll out", have,
                           "" if together else f", of which at least {training} must train")

    def _too_many(self, keys: list[str], need: str, have: int, rest: str) -> None:
        sizes = " x ".join(f"{key} {self.pin(key)}" for key in keys)
        self.add(f"{sizes} take {need}, and the cluster has {have}{rest}", *keys, "cluster",
                 fix="lower one of them, or use a larger cluster")
