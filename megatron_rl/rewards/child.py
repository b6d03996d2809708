"""The code of a reward worker process. It is tied to the pool only by one connection and the pool's lifetime."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from megatron_rl.rewards.guards import check_guards
from megatron_rl.rewards.load import Reward, load_rewards
from megatron_rl.rewards.sample import Sample, Score

# Messages to the pool, as (kind, value).
READY = "ready"
REFUSED = "refused"
"""The rewards cannot be used. Value: the UserError."""
RUNNING = "running"
"""Value: the function about to run. Sent if there are several, so that a hang or a death can be attributed."""
SCORED = "scored"
"""Value: the Score of the next sample."""


def main(connection: Connection, config: RewardConfig, columns: Sequence[str] | None, log_path: Path | None) -> None:
    """Load the rewards, run their guards, then score lists of samples until the connection closes.

    The functions run in this process's main thread, so those that use signals work. One message is sent per sample, so
    the pool sees progress sample by sample.
    """
    _settle(log_path)
    try:
        rewards = load_rewards(config, columns)
        check_guards(rewards)
    except UserError as error:
        connection.send((REFUSED, error))
        return
    connection.send((READY, None))
    while True:
        try:
            samples: list[Sample] = connection.recv()
        except EOFError:
            return
        for sample in samples:
            connection.send((SCORED, score(rewards, sample, connection if len(rewards) > 1 else None)))


def score(rewards: Sequence[Reward], sample: Sample, connection: Connection | None = None) -> Score:
    """The weighted sum over the rewards. Anything that a function raises becomes a Score with status `error`."""
    components: dict[str, float] = {}
    total = 0.0
    for reward in rewards:
        if connection is not None:
            connection.send((RUNNING, reward.name))
        try:
            value = reward(sample)
        except BaseException as error:  # sys.exit and math-verify's timeout are not Exceptions: report them all
            return Score.failed("error", _describe(error), reward.name, components)
        components[reward.name] = value
        total += reward.weight * value
    return Score(total, components)


def _describe(error: BaseException) -> str:
    """The exception and the line that raised it, short enough for one message."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + line


def _settle(log_path: Path | None) -> None:
    # In its own process group: Ctrl-C reaches only the driver, and processes started by a reward end with it.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if log_path is not None:
        with log_path.open("a") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    # math-verify warns that its timeout is off. This is intended: the pool sets the deadline.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()


def _die_with_parent() -> None:
    """End with the pool's process, which may be killed (SIGKILL) without closing anything while a reward hangs here."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(os.getpgid(0), signal.SIGKILL)
