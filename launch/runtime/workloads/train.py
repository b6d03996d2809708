"""The training on one node: Ray's head and the driver on the placement's first node, a raylet on every other node.

Each node writes `nodes/<node>/ray.json` when Ray's control store lists it, and the driver counts all nodes again before
it starts an actor. Raylets on one host start one after the other, because they conflict if they start at the same time.
(Simulated nodes share a host; real nodes do not, and start together.)
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launch import envvars, processes
from launch.errors import UserError
from launch.files.shared import read_shared, seen, write_atomically
from launch.plan.plan import Placement
from launch.planner.seats.local import LOOPBACK
from launch.run.attempts import Attempt
from launch.runtime.ray_node import (
    ADDRESS_VARIABLE,
    RaySession,
    new_secret,
    object_store_bytes,
    ray_environment,
    registered,
    start_head,
    start_raylet,
)
from launch.runtime.workloads import NodeContext

DRIVER = "megatron_rl.train"
TOKEN_FILE = "ray-token"
"""File in the attempt's folder, readable only by the user, that passes the token to other nodes while the job runs."""


class RayNotUp(RuntimeError):
    """Ray did not start on this node."""


@dataclass(frozen=True)
class Training:
    """The running processes of this node."""

    children: list[processes.Child]
    """As soon as one of them ends, the node's part of the job is over."""
    session: RaySession
    attempt: Attempt
    node: str

    def close(self, *, failed: bool = False) -> None:
        """Remove files outside the attempt's folder. Call this after all processes of this node have ended.

        Args:
            failed: whether to keep Ray's own logs in the attempt's folder.
        """
        if failed:
            self.session.keep_logs(self.attempt.logs / f"ray-{self.node}")
        self.session.remove()
        if self.node == self.attempt.placement().nodes[0]:
            (self.attempt.folder / TOKEN_FILE).unlink(missing_ok=True)


def start(context: NodeContext, driver: str = DRIVER) -> Training:
    """Start this node's part of the job and return once Ray lists the node. The driver starts at the same time as the
    head, because reading the data takes as long as starting Ray; it waits for Ray itself.

    Args:
        driver: the module to run on Ray.

    Raises:
        RayNotUp: Ray ended, or did not register within `run.deadline_s`.
    """
    attempt, node, placement = context.attempt, context.node, context.attempt.placement()
    address = placement.addresses[node]
    if len(placement.nodes) > 1 and address == LOOPBACK:
        raise RayNotUp(f"a job on {len(placement.nodes)} nodes cannot meet at {LOOPBACK}, the address of {node}")
    environment = {**ray_environment(attempt.config(), attempt.plan().device, attempt.mark, address,
                                     placement.interface(node)), envvars.NODE: node}
    log = attempt.logs / f"ray-{node}.log"
    if node == placement.nodes[0]:
        session, listens = _session(context, new_secret()), f"{address}:{context.ports.ray_gcs}"
        write_atomically(attempt.folder / TOKEN_FILE, session.secret, mode=0o600)
        ray = start_head(session, context.ports, node=node, address=address, environment=environment, log=log)
        drives = processes.start(
            "driver", [sys.executable, "-m", driver, str(attempt.folder)], log=attempt.logs / "driver.log",
            environment={**environment, **session.variables(), ADDRESS_VARIABLE: listens})
        started = Training([ray, drives], session, attempt, node)
    else:
        for other in _before(placement, node):
            _wait(context, partial(seen, _ray_file(attempt, other)), f"Ray on {other}")
        token, listens = attempt.folder / TOKEN_FILE, f"{address}:{context.ports.ray_node_manager}"
        _wait(context, lambda: seen(token), str(token))
        session = _session(context, secret=token.read_text(encoding="ascii"))
        head = ray_address(attempt, placement.nodes[0])
        assert head is not None         # the loop above has waited for it
        ray = start_raylet(session, context.ports, node=node, address=address, head=head, environment=environment,
                           log=log)
        started = Training([ray], session, attempt, node)
    try:
        _wait_registered(context, ray, listens)
    except BaseException:
        started.close(failed=True)
        raise
    return started


def _session(context: NodeContext, secret: str) -> RaySession:
    """Ray's folder and settings on this node, which are also logged. `secret` is the job's token."""
    nodes, config = len(context.attempt.placement().nodes), context.attempt.config()
    session = RaySession(nodes=nodes, secret=secret, deadline_s=config.run.deadline_s,
                         object_store_bytes=object_store_bytes(config, shutil.disk_usage("/dev/shm").free))
    context.say(str(session))
    return session


def ray_address(attempt: Attempt, node: str) -> str | None:
    """address:port of Ray's control store (on the first node) or of the raylet, once `node` has registered."""
    known = read_shared(_ray_file(attempt, node))
    return None if known is None else known["address"]


def _before(placement: Placement, node: str) -> list[str]:
    """Nodes whose Ray must be registered before `node` starts: the head, and the previous node at the same address."""
    same = [other for other in placement.nodes if placement.addresses[other] == placement.addresses[node]]
    return [placement.nodes[0], *same[:same.index(node)][-1:]]


def _wait(context: NodeContext, condition: Callable[[], bool], what: str) -> None:
    """Wait. A missed deadline here is a failure of the machines, not a user error."""
    try:
        context.wait(condition, what, context.attempt.config().run.deadline_s)
    except UserError as error:
        raise RayNotUp(str(error)) from error


def _wait_registered(context: NodeContext, ray: processes.Child, address: str) -> None:
    def known() -> bool:
        if ray.returncode is not None:
            raise RayNotUp(f"Ray on {context.node} ended with status {ray.returncode} during start-up: see {ray.log}")
        return registered(ray)

    began = time.monotonic()
    _wait(context, known, f"Ray on {context.node} to register (log: {ray.log})")
    _ray_file(context.attempt, context.node).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_ray_file(context.attempt, context.node), json.dumps(
        {"node": context.node, "address": address, "pid": ray.pid, "seconds": time.monotonic() - began}),
        durable=True)


def _ray_file(attempt: Attempt, node: str) -> Path:
    return attempt.folder / "nodes" / node / "ray.json"
