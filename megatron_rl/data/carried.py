"""Groups that were generated ahead of the trainer, as a file of a checkpoint (`rollouts.npz`). Arrays only, no pickle.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.data.batch import Group, Prompt, Trajectory

FILE = "rollouts.npz"
FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class CarriedGroup:
    """A group without its prompt, which the data set holds."""

    step: int
    """The step that trains it."""
    place: int
    """Its place in the batch of that step."""
    prompt_index: int
    trajectories: tuple[Trajectory, ...]
    engine: int

    @staticmethod
    def of(step: int, place: int, group: Group) -> CarriedGroup:
        return CarriedGroup(step, place, int(group.prompt.index), group.trajectories, group.engine)

    def group(self, prompt: Prompt) -> Group:
        return Group(prompt, self.trajectories, self.engine)

    @property
    def oldest(self) -> int:
        """The oldest weight version that sampled one of its tokens."""
        return min(int(each.weight_versions[each.sampled].min()) for each in self.trajectories if each.length)


def encode(groups: Sequence[CarriedGroup]) -> bytes:
    """The content of the file."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    texts = [trajectory.text.encode() for trajectory in trajectories]
    buffer = io.BytesIO()
    np.savez(
        buffer,
        step_G=np.array([group.step for group in groups], np.int64),
        place_G=np.array([group.place for group in groups], np.int64),
        prompt_index_G=np.array([group.prompt_index for group in groups], np.int64),
        engine_G=np.array([group.engine for group in groups], np.int64),
        size_G=np.array([len(group.trajectories) for group in groups], np.int64),
        length_B=np.array([len(each.token_ids) for each in trajectories], np.int64),
        finish_B=np.array([FINISH_REASONS.index(each.finish_reason) for each in trajectories], np.uint8),
        token_ids_N=_joined([each.token_ids for each in trajectories], np.int32),
        sampled_N=_joined([each.sampled for each in trajectories], np.bool_),
        logprobs_N=_joined([each.logprobs for each in trajectories], np.float32),
        weight_versions_N=_joined([each.weight_versions for each in trajectories], np.int32),
        text_bytes_B=np.array([len(text) for text in texts], np.int64),
        text=np.frombuffer(b"".join(texts), np.uint8))
    return buffer.getvalue()


def read(path: Path) -> list[CarriedGroup]:
    """The groups of a checkpoint. A checkpoint without the file has none."""
    if not path.exists():
        return []
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    ends_B = np.cumsum(arrays["length_B"])
    text_ends_B = np.cumsum(arrays["text_bytes_B"])
    trajectories = []
    for length, end, finish, nbytes, text_end in zip(
            arrays["length_B"], ends_B, arrays["finish_B"], arrays["text_bytes_B"], text_ends_B, strict=True):
        here = slice(end - length, end)
        trajectories.append(Trajectory(
            arrays["token_ids_N"][here], arrays["sampled_N"][here], arrays["logprobs_N"][here],
            arrays["weight_versions_N"][here], FINISH_REASONS[finish],
            bytes(arrays["text"][text_end - nbytes:text_end]).decode()))
    groups, taken = [], 0
    for step, place, prompt_index, engine, size in zip(*(arrays[f"{name}_G"] for name in (
            "step", "place", "prompt_index", "engine", "size")), strict=True):
        groups.append(CarriedGroup(int(step), int(place), int(prompt_index), tuple(trajectories[taken:taken + size]),
                                   int(engine)))
        taken += size
    return groups


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
