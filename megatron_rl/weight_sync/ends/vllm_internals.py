"""Every private name of vLLM that this project uses, in one place, for the pinned version (requirements/*.lock).

To adopt a new vLLM version, run the tests of `weight_sync` and `rollout`: they run each function below against vLLM's
own loading and against Hugging Face.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

TESTED_VERSION = "0.32"


def keep_cpu_weights_in_place() -> None:
    """Leave linear weights as loaded on the CPU, so that writes into the live parameters take effect.

    vLLM's CPU build packs linear weights into oneDNN or SGL blobs after loading: `weight` becomes `empty(0)`, and the
    head keeps its shape but multiplies with a packed copy. Without both kernels, it falls back to
    `torch.nn.functional.linear` on the live parameter, like a GPU. Call this in the worker before the model is loaded.
    """
    import vllm._custom_ops as custom_ops
    import vllm.model_executor.layers.utils as layer_utils

    custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda *args: False
    # A first small forward pass in bf16 dies with SIGILL unless AMX was requested from the kernel before.
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def live_model(worker) -> nn.Module:
    """The model of a worker (`self` of a worker extension)."""
    return worker.model_runner.get_model()


def end_update(worker) -> None:
    """End a worker's weight update if one is open. vLLM's own `finish_weight_update` raises if there is none."""
    if worker._weight_update_active:
        worker.finish_weight_update()


def in_vllms_config(worker) -> contextlib.AbstractContextManager:
    """The context that vLLM's own reload runs in."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(worker.vllm_config)


def least_over_tp(value: int) -> int:
    """The least of the values that the TP ranks of this engine give. All of them must call it."""
    from vllm.distributed.parallel_state import get_tp_group

    least = torch.tensor([value])
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return int(least)


def loader_shapes(layer: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's own parameters as they were before vLLM loaded them, on the meta device. Biases are not among them,
    because vLLM never changes their form."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return dict(get_layerwise_info(layer).restore_metadata[0])


def quantises(layer: nn.Module) -> bool:
    """Whether vLLM converts what it loads into this layer."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(layer, "quant_method", None)
    # Linear, embedding and expert layers that stay as loaded also have methods, whose classes share only this prefix.
    return isinstance(method, QuantizeMethodBase) and not type(method).__name__.startswith("Unquantized")


@contextlib.contextmanager
def loader_form(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which the layers have the parameters that vLLM's loaders fill, on the meta device. Afterwards they
    have those that the engine computes with again, the same objects as before."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_loader_form(layer))
        yield


@contextlib.contextmanager
def processed(layer: nn.Module, loaded: Mapping[str, torch.Tensor]
              ) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Run one layer through vLLM's layer-wise reload: name of each tensor that the engine computes with -> (that
    tensor, what vLLM makes of `loaded` for it). Afterwards the layer is unchanged.

    All TP ranks must process their layers in the same order, because a scale may be reduced over the ranks.

    Args:
        loaded: a value for each name in `loader_shapes`. It is used as it is, not copied.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    live = get_layer_tensors(layer)
    with _loader_form(layer), torch.no_grad():
        for name, value in loaded.items():
            given, form = value.detach(), getattr(layer, name)
            given.__class__, given.__dict__ = form.__class__, dict(form.__dict__)   # as vLLM materialises a tensor
            setattr(layer, name, given)
        materialize_layer(layer, get_layerwise_info(layer))     # what vLLM does not load
        layer.__dict__.pop("_already_called_process_weights_after_loading", None)
        vllms: Any = layer          # beyond what torch knows of a module
        vllms.quant_method.process_weights_after_loading(layer)
        if hasattr(layer, "update_param_tp_status"):
            vllms.update_param_tp_status()
        made = get_layer_tensors(layer)
        yield {name: (tensor, made.get(name)) for name, tensor in live.items()}


@contextlib.contextmanager
def _loader_form(layer: nn.Module) -> Iterator[None]:
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
    from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    try:
        restore_layer_on_meta(layer, info)
        for tensor in get_layer_tensors(layer).values():
            tensor.weight_loader = layerwise._get_original_loader(tensor)
        yield
    finally:
        layerwise._place_kernel_tensors(layer, info)
        info.reset()


@contextlib.contextmanager
def offline_model(folder: str | Path, tp: int, rank: int, dtype: torch.dtype, device: str = "meta",
                  quantization: str | None = None) -> Iterator[nn.Module]:
    """vLLM's model as tensor parallel rank `rank` of `tp` builds it, in this process and without workers.

    The real parallel groups have one member. Inside the context, the TP group only reports another size and rank, which
    is all that vLLM's layers and weight loaders use. Weights can be loaded, but the model cannot run.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    name = str(dtype).removeprefix("torch.")
    config = EngineArgs(model=str(folder), dtype=name, enforce_eager=True, skip_tokenizer_init=True,
                        max_model_len=64, quantization=quantization).create_engine_config()
    config.parallel_config.tensor_parallel_size = tp
    with set_current_vllm_config(config):
        _single_process_groups()
        group = parallel_state._TP
        true_size, true_rank = group.world_size, group.rank_in_group
        group.world_size, group.rank_in_group = tp, rank
        # Models of a process share rotary embeddings, and the first one's may be on the meta device.
        ropes = dict(_ROPE_DICT)
        _ROPE_DICT.clear()
        try:
            with set_default_torch_dtype(dtype), torch.device(device):
                model = initialize_model(vllm_config=config)
            yield model
        finally:
            group.world_size, group.rank_in_group = true_size, true_rank
            _ROPE_DICT.clear()
            _ROPE_DICT.update(ropes)


def _single_process_groups() -> None:
    from vllm.distributed import parallel_state
    from vllm.utils.network_utils import get_open_port

    if parallel_state._TP is None:
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)


def shut_down(llm, timeout_s: float) -> None:
    """End an AsyncLLM with its engine core and workers. Processes that outlive `timeout_s` are killed by their PIDs."""
    import psutil

    processes = []
    for core in llm.engine_core.resources.engine_manager.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(core.pid)
            processes += [process, *process.children(recursive=True)]
    llm.shutdown(timeout=timeout_s / 2)
    _, alive = psutil.wait_procs(processes, timeout=timeout_s / 2)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s / 2)
    # AsyncLLM.__del__ shuts down again, and fails noisily if it first runs while the interpreter ends.
    type(llm).__del__ = lambda self: None


async def pause_scheduler(llm, *, clear_cache: bool) -> None:
    """Stop scheduling. Running requests keep their place. `AsyncLLM.pause_generation` would add a fixed sleep."""
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


class OutputCounter:
    """Counts what comes from the engine core.

    Requests that only want their final output report nothing until they end, and vLLM's own counters need its
    statistics. This is one pass over an iteration's outputs.
    """

    def __init__(self, llm) -> None:
        self.tokens = 0
        """Number of tokens so far."""
        self.ended = asyncio.Event()
        """Set when the next sequence ends, and then replaced."""
        process_outputs = llm.output_processor.process_outputs

        def counting(outputs, *args, **kwargs):
            self.tokens += sum(len(output.new_token_ids) for output in outputs)
            processed = process_outputs(outputs, *args, **kwargs)
            if any(output.finished for output in outputs):
                ended, self.ended = self.ended, asyncio.Event()
                ended.set()
            return processed

        llm.output_processor.process_outputs = counting


def output_handler(llm) -> asyncio.Task:
    """The task that ends when the engine's processes have ended."""
    return llm.output_handler
