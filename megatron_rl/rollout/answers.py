"""What a sound rollout engine never returns."""

from __future__ import annotations

import numpy as np

from megatron_rl.data.batch import Group, Prompt


class BadAnswer(RuntimeError):
    """An engine returned something that it was not asked for, or that no sound engine returns."""


def check_group(group: Group, prompt: Prompt, count: int, vocabulary: int, versions: range) -> None:
    """Check the group that an engine returned for `prompt`.

    Args:
        count: the number of trajectories that it was asked for.
        vocabulary: the number of token ids.
        versions: the weight versions that it may have sampled from.

    Raises:
        BadAnswer: the group belongs to another prompt, has other tokens or versions, or log-probs that are not finite.
    """
    if group.prompt.index != prompt.index or len(group.trajectories) != count:
        raise BadAnswer(f"asked for {count} trajectories of prompt {prompt.index}, got {len(group.trajectories)} of "
                        f"prompt {group.prompt.index}")
    for each in group.trajectories:
        for what, values_R, allowed in (("token ids", each.token_ids, range(vocabulary)),
                                        ("weight versions", each.weight_versions[each.sampled], versions)):
            if values_R.size and not (allowed.start <= values_R.min() and values_R.max() < allowed.stop):
                raise BadAnswer(f"a trajectory of prompt {prompt.index} has {what} from {values_R.min()} to "
                                f"{values_R.max()}, and only {allowed.start} to {allowed.stop - 1} exist")
        if not np.isfinite(each.logprobs[each.sampled]).all():
            raise BadAnswer(f"a trajectory of prompt {prompt.index} has log-probs that are not finite: the engine "
                            "computes wrongly, or its weights are not finite")
