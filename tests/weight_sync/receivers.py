"""Rollout workers without an engine: real processes that hold vLLM's parameters and run the plug-in's own code.

A vLLM engine at TP 4 is four processes that each start a runtime; what a weight sync touches of them is a model,
vLLM's worker methods and the plug-in, and those run here as they are. Only the executor between engine and workers is
replaced by pipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.weights import EngineWeights
from megatron_rl.sync_bench.members import Member
from megatron_rl.sync_bench.world import PipedEngine
from megatron_rl.weight_sync.protocol import Staging
from tests.weight_sync.members import NO_DEADLINE_S


class ReceivingEngine(EngineWeights):
    """The real `EngineWeights`, over pipes to the workers instead of vLLM's executor."""

    def __init__(self, members: Sequence[Member], replica: int = 0, staging: Staging = "in_place",
                 dtype: str = "float32") -> None:
        piped = PipedEngine(members, replica, dtype, NO_DEADLINE_S)
        super().__init__(cast(VllmEngine, piped), replica, len(members), dtype, "127.0.0.1", staging)
        self.members, self.rpc = members, piped.rpc

    def kill(self) -> None:
        for member in self.members:
            member._process.kill()
            member._process.join()


class RebuiltWorker:
    """A worker in a process of its own, built again for each case: vLLM is imported once a process. "build" must be the
    first call."""

    def __init__(self) -> None:
        import torch

        from launch import envvars
        from tests.rollout.engines import run_config

        torch.set_num_threads(1)
        envvars.set_for_this_process(envvars.environment("rollout", "cpu", run_config(Path("unused")), job="tests"))
        self._worker = None

    def build(self, *args: Any) -> None:
        if self._worker is not None:
            self._worker.leave()
        self._worker = _build(*args)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._worker, method)


def load_as_vllm_does(model: Any, folder: str | Path | None) -> None:
    """What vLLM's model loaders do with a model that was just made: the weights in `folder`, or dummy ones."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import get_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    config = get_current_vllm_config().model_config
    if folder is None:
        DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, config)
    else:
        model.load_weights(iter(load_file(Path(folder) / "model.safetensors").items()))
        finalize_layerwise_processing(model, config)
    process_weights_after_loading(model, config, torch.device("cpu"))


def _build(folder: str, tp: int, rank: int, staging: Staging = "in_place", quantization: str | None = None) -> Any:
    """A worker of TP rank `rank`: vLLM's `Worker` methods, the plug-in's extension and its transfer engine over
    vLLM's own model, whose parameters hold NaN until they are written. Quantised, it has vLLM's dummy weights."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import get_current_vllm_config
    from vllm.v1.worker.gpu_worker import Worker

    from megatron_rl.weight_sync.ends.vllm_internals import offline_model
    from megatron_rl.weight_sync.ends.vllm_plugin import InPlaceTransferEngine, ShadowTransferEngine, WeightSyncWorker

    class _Worker(WeightSyncWorker, Worker):
        def __init__(self, model: torch.nn.Module, stack: ExitStack) -> None:
            self._stack = stack
            self.vllm_config = get_current_vllm_config()
            self.vllm_config.parallel_config.rank = self.rank = rank
            self.model_runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)
            kind = ShadowTransferEngine if staging == "shadow" else InPlaceTransferEngine
            self.weight_transfer_engine = kind(None, self.vllm_config, torch.device("cpu"), model)
            self._weight_update_active = self._weight_update_is_draft = False
            self.model = model

        def leave(self) -> None:
            self.weight_transfer_engine.shutdown()
            self._stack.close()

        def differences(self, checkpoint: str) -> tuple[int, list[str], int]:
            """Parameters compared; those whose bytes are not what vLLM loads of `checkpoint` itself; and the digest
            of what vLLM loaded, over the traced layout."""
            from megatron_rl.layouts.digest import digest_layouts
            from megatron_rl.layouts.tiles import CanonicalTensor
            from megatron_rl.layouts.vllm import trace_layout

            tensors = load_file(Path(checkpoint) / "model.safetensors")
            live = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
            self.model.load_weights(iter(tensors.items()))
            loaded = dict(self.model.named_parameters())
            wrong = [name for name in loaded if not torch.equal(live[name].view(torch.uint8),
                                                                loaded[name].detach().view(torch.uint8))]
            canonical = [CanonicalTensor(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
            digest = digest_layouts(trace_layout(self.model, canonical, torch.float32).layouts, loaded)
            for name, value in live.items():
                loaded[name].data.copy_(value)
            return len(live), wrong, digest

        def unlike_own_loading(self, checkpoint: str) -> tuple[list[str], list[str], list[int]]:
            """Names of the tensors that are not what vLLM makes of `checkpoint` when it loads it into a model of its
            own, first of quantised layers, then of others; and the address of every tensor."""
            live = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            with offline_model(folder, tp, rank, torch.bfloat16, "cpu", quantization) as itself:
                load_as_vllm_does(itself, checkpoint)
                made = {**dict(itself.named_parameters()), **dict(itself.named_buffers())}
            assert made.keys() == live.keys()
            wrong = [name for name in live if not torch.equal(live[name].detach().reshape(-1).view(torch.uint8),
                                                              made[name].detach().reshape(-1).view(torch.uint8))]
            quantised = [name for name in wrong if "_proj.weight" in name]
            others = [name for name in wrong if name not in quantised]
            return quantised, others, [each.data_ptr() for each in live.values()]

        def memory(self) -> tuple[int, int]:
            """Bytes of the model's parameters, and of the buffers of quantised layers."""
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in self.model.parameters()}
            return sum(each.nbytes() for each in storages.values()), self.weight_transfer_engine.layers.nbytes

        def fail_quantising(self, at: int) -> None:
            """Layer number `at` fails when it is quantised next; -1: none does."""
            layers = list(self.weight_transfer_engine.quantised._layers.values())
            for number, layer in enumerate(layers):
                layer.quant_method.__dict__.pop("process_weights_after_loading", None)
                if number == at:
                    layer.quant_method.process_weights_after_loading = lambda layer: 1 / 0

    with ExitStack() as stack:
        if quantization:
            model = stack.enter_context(offline_model(folder, tp, rank, torch.bfloat16, "cpu", quantization))
            load_as_vllm_does(model, None)
        else:
            model = stack.enter_context(offline_model(folder, tp, rank, torch.float32, device="cpu"))
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
        return _Worker(model, stack.pop_all())
