"""The bound on the staleness during a run: lowered when the batches diverge from the policy, raised again when calm."""

from __future__ import annotations

from typing import Any

HIGH = 0.2
"""`drift/divergence` of a batch above which the bound goes down."""
LOW = 0.1
"""Below it, a step is calm."""
CALM_STEPS = 20
"""Calm steps in a row after which the bound goes up."""


class StalenessBound:
    """k, the number of versions that a batch may be handed out ahead of its turn.

    A batch whose tokens diverge lowers it by one at once. The batches that were handed out before are still trained,
    and they can diverge for the same cause: they lower it no further, because they do not show what the lower bound
    does.

    Args:
        most: the configured bound (`algorithm.max_staleness`), which `now` never exceeds.
    """

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._calm = 0

    def observe(self, divergence: float | None, bound: int) -> str | None:
        """Take note of a trained batch.

        Args:
            divergence: mean |pi/mu - 1| over the batch's tokens, or None if it had none.
            bound: the bound under which the batch was handed out.
        Returns:
            What changed and why, or None.
        """
        if divergence is None:
            return None
        self._calm = self._calm + 1 if divergence < LOW else 0
        before = self.now
        if divergence > HIGH and bound <= before:
            self.now = max(0, before - 1)
            why = f"the batch diverges by {divergence:.0%} from the policy, more than {HIGH:.0%}"
        else:
            if self._calm == CALM_STEPS:
                self._calm, self.now = 0, min(self.most, before + 1)
            why = f"{CALM_STEPS} steps in a row diverged by less than {LOW:.0%}"
        if self.now == before:
            return None
        return (f"the bound on the staleness goes from {before} to {self.now} (algorithm.max_staleness = {self.most}): "
                f"{why}")

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable state, stored in every checkpoint."""
        return {"most": self.most, "now": self.now, "calm": self._calm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. A bound that the user changed since then holds as written."""
        if state["most"] == self.most:
            self.now, self._calm = state["now"], state["calm"]
