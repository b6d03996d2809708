"""A rollout worker without an engine: vLLM's own model, which never runs, and the real `InPlaceTransferEngine` that
writes into it. The pipe of a member process replaces vLLM's executor."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import torch
from vllm.config import get_current_vllm_config

from megatron_rl.layouts.digest import digest_layouts
from megatron_rl.layouts.vllm import decode_layout
from megatron_rl.weight_sync.ends.vllm_internals import offline_model
from megatron_rl.weight_sync.ends.vllm_plugin import InPlaceTransferEngine, ShadowTransferEngine, WeightSyncWorker
from megatron_rl.weight_sync.protocol import Staging


class RolloutWorker(WeightSyncWorker):
    """Runs in a member process. Its methods are those that an engine calls in vLLM's worker."""

    def __init__(self, model_folder: str, tp: int, rank: int, dtype: str, device: str) -> None:
        torch.set_num_threads(1)
        self._open = ExitStack()                            # the model's parallel groups last as long as the process
        self.model = self._open.enter_context(offline_model(model_folder, tp, rank, getattr(torch, dtype), device))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.vllm_config, self._device = get_current_vllm_config(), torch.device(device)
        self.vllm_config.parallel_config.rank = rank
        self._weight_update_active = False
        self.weight_transfer_engine = InPlaceTransferEngine(None, self.vllm_config, self._device, self.model)

    def stage(self, staging: Staging) -> None:
        """From now on, receive in place or into a second copy."""
        self.weight_transfer_engine.shutdown()
        kind = ShadowTransferEngine if staging == "shadow" else InPlaceTransferEngine
        self.weight_transfer_engine = kind(None, self.vllm_config, self._device, self.model)

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: dict) -> None:
        self.weight_transfer_engine.update_weights(update_info)

    def finish_weight_update(self) -> None:
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def sync_layout(self, canonical: list, dtype: str) -> dict:
        answer = super().sync_layout(canonical, dtype)
        self.layouts = [decode_layout(plain) for plain in answer.get("layouts", [])]
        return answer

    def staging_bytes(self) -> int:
        """Bytes of the receiver's buffers."""
        return self.weight_transfer_engine.sync.staging_bytes

    def whole_digest(self) -> int:
        """Digest of everything that this worker holds, without padding."""
        return digest_layouts(self.layouts, dict(self.model.named_parameters()))

    def spoil(self) -> None:
        """Overwrite all weights, so that the next sync cannot pass with those of the last one."""
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)
