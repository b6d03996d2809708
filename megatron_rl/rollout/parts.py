"""Parts of a batch that are trained while its other groups are still generated (`algorithm.overlap`).

A part should be worth a pass of the trainer: small parts leave DP ranks, pipeline stages and room in micro-batches
unused. What no part takes is trained last, whatever its size.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from launch.plan.plan import PARTS, Plan
from megatron_rl.data.batch import Group


@dataclass(frozen=True)
class FairShare:
    """The smallest part that is trained on its own."""

    groups: int
    tokens: int

    @classmethod
    def of(cls, plan: Plan) -> FairShare:
        """A share of 1 / PARTS of the batch, and enough sequences for all DP ranks. A pipeline also needs PP
        micro-batches on each of them, because it has idle stages with fewer."""
        training, batch = plan.training, plan.batch
        micro_batches = training.dp * training.pp
        return cls(groups=max(-(-batch.prompts_per_step // PARTS), -(-micro_batches // batch.group_size)),
                   tokens=micro_batches * batch.token_budget if training.pp > 1 else 0)

    def next_part(self, complete: Mapping[int, Group], scored: Collection[int], taken: Collection[int], count: int,
                  in_order: bool) -> list[int]:
        """The places of the groups of the next part; empty if too few are complete, or if all others are complete.

        Args:
            complete: the groups that are ready to be trained, by place.
            scored: their places, and with dynamic sampling also those of groups without spread.
            taken: places in earlier parts.
            count: number of groups that the batch trains.
            in_order: parts are the shortest runs of places that are large enough, whatever is complete. So they never
                depend on timing. The last one is what remains.
        """
        if not in_order:
            ready = sorted(complete.keys() - taken)
            return ready if len(complete) < count and self._reached(ready, complete) else []
        run: list[int] = []
        for place in itertools.takewhile(lambda place: place in scored, itertools.count()):
            if place in complete and place not in taken:
                run.append(place)
            if len(taken) + len(run) == count:
                break
            if self._reached(run, complete):
                return run
        return []

    def _reached(self, places: list[int], complete: Mapping[int, Group]) -> bool:
        if len(places) < self.groups or not self.tokens:
            return len(places) >= self.groups
        tokens = sum(len(complete[place].prompt.token_ids)
                     + sum(len(each.token_ids) for each in complete[place].trajectories) for place in places)
        return tokens >= self.tokens
