"""Checks pinned sizes against the cluster before the search. A size that no plan can have is a mistake in the input and
gets its own message instead of "no plan fits"."""

from __future__ import annotations

from math import prod

from launch.errors import Problems, divisors
from launch.planner.search.problem import Problem


def check_pins(problem: Problem) -> None:
    """Reject sizes that contradict each other or the cluster. Raises a UserError that shows all of them."""
    checker = _Checker(problem)
    checker.modes()
    checker.nodes()
    checker.tensor_parallel()
    checker.gpus()
    checker.problems.raise_if_any()


class _Checker:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.cluster = problem, problem.cluster
        self.pinned = problem.modes[0] if len(problem.modes) == 1 else "auto"
        self.problems = Problems(problem.origin.path)

    def add(self, what: str, *keys: str, fix: str) -> None:
        self.problems.add(what, where=self.problem.origin.where(*keys), fix=fix)

    def pin(self, key: str) -> int | None:
        """The value of a key; None if it is open."""
        return self.problem.pins.of(key)

    def modes(self) -> None:
        mode, problem = self.pinned, self.problem
        if mode in ("colocated", "hybrid") and problem.max_staleness:
            self.add(f"placement.mode = {mode} with algorithm.max_staleness = {problem.max_staleness}: trainer and "
                     "engines take turns on the same GPUs", "placement.mode", "algorithm.max_staleness",
                     fix="use algorithm.max_staleness=0 or auto, or placement.mode=disaggregated")
        if mode in ("colocated", "hybrid") and problem.overlap:
            self.add(f"placement.mode = {mode} with algorithm.overlap = true: trainer and engines take turns on the "
                     "same GPUs", "placement.mode", "algorithm.overlap",
                     fix="use algorithm.overlap=false, or placement.mode=disaggregated")

    def nodes(self) -> None:
        spares, have, training = self.problem.spare_nodes, len(self.cluster.nodes), self.pin("placement.training_nodes")
        if spares >= have:
            self.add(f"placement.spare_nodes = {spares} leaves none of the cluster's {have} nodes",
                     "placement.spare_nodes", "cluster", fix=f"use placement.spare_nodes <= {have - 1}")
        elif training is not None and self.pinned == "disaggregated":
            left = have - spares
            spare = f", {spares} of them spare" if spares else ""
            what = f"placement.training_nodes = {training} leaves no node for rollout: the cluster has {have}{spare}"
            if have == 1:
                self.add(f"{what}, and the two partitions divide its GPUs", "placement.training_nodes", "cluster",
                         fix="use placement.training_nodes=auto")
            elif training >= left:
                self.add(what, "placement.training_nodes", "cluster",
                         fix=f"use placement.training_nodes <= {left - 1}" if left > 1 else "use a larger cluster")

    def tensor_parallel(self) -> None:
        node, allowed = self.cluster.gpus_per_node, self.problem.pins.tp_across_nodes
        for key in ("trainer.tp", "rollout.tp"):
            tp = self.pin(key)
            if tp is not None and node % tp and not (allowed and tp % node == 0):
                whole = f", or whole nodes ({2 * node}, {3 * node}, ...) with placement.tp_across_nodes=true"
                self.add(f"{key} = {tp} does not fit into nodes of {node} GPUs: a TP group stays inside a node", key,
                         "cluster", fix=f"use {key} = {divisors(node)}{whole if tp > node else ''}")

    def gpus(self) -> None:
        have = (len(self.cluster.nodes) - self.problem.spare_nodes) * self.cluster.gpus_per_node
        trainer = [key for key in ("trainer.tp", "trainer.pp", "trainer.cp", "trainer.dp") if self.pin(key)]
        rollout = [key for key in ("rollout.replicas", "rollout.tp") if self.pin(key)]
        training, engines = (prod(self.pin(key) or 1 for key in keys) for keys in (trainer, rollout))
        together = self.pinned != "disaggregated"
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
