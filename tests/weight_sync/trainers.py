"""Real training ranks behind handles: one process each, Megatron on gloo, as the driver's actors hold them."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launch.config.resolved import ResolvedConfig
from tests.ranks import Rank, free_port
from tests.trainer.harness import make_plan
from tests.weight_sync.members import Observed, processes_of, start_all
from tests.weight_sync.sources import SourceRank

PWRITE = os.pwrite


@contextmanager
def trainer_ranks(config: ResolvedConfig) -> Iterator[list[SourceRank]]:
    """The ranks of a configuration's plan, with the initial weights of its model."""
    world, port = make_plan(config).training.world_size, free_port()
    each = [(config, Rank(rank, world, "127.0.0.1", port, 60.0)) for rank in range(world)]
    with processes_of("tests.weight_sync.trainers:TrainerProcess", each) as made:
        start_all(made)
        yield list(map(SourceRank, made))


class TrainerProcess(Observed):
    def __init__(self, config: ResolvedConfig, rank: Rank) -> None:
        from tests.trainer.runs import start

        self.rank = rank
        self.trainer = start(rank, config)
        self.trainer.load_initial_weights()

    def export(self, folder: str, part: str):
        return self.trainer.export(folder, part)

    def train(self, config: ResolvedConfig) -> None:
        """Another model in the same layout, and one update of it."""
        from megatron_rl.trainer.trainer import MegatronTrainer
        from tests.trainer.harness import make_plan
        from tests.trainer.runs import batches

        self.trainer = MegatronTrainer(config, make_plan(config), self.rank.rank)
        self.trainer.load_initial_weights()
        self.trainer.update(batches(self.trainer.plan.architecture.vocab, 1)[0])

    def logprobs(self, batch):
        from tests.trainer.runs import logprobs

        return logprobs(self.trainer, batch)

    def limit_files(self, size: int) -> None:
        """The system refuses writes beyond this place of a file, as a quota does; -1: no more."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def die_at_write(self, number: int) -> None:
        """The process is killed before it writes its run of bytes `number`."""
        left = iter(range(number))

        def deadly(*args: Any) -> int:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return PWRITE(*args)

        os.pwrite = deadly

    def damage_writes(self, damage: bool) -> None:
        """Of what this rank writes the slices of columns are lost."""
        os.pwrite = (lambda descriptor, data, at: len(data) if len(data) < 1000 else PWRITE(descriptor, data, at)) \
            if damage else PWRITE
