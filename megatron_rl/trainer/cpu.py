"""Replacements for CUDA when Megatron-core runs on a CPU. Does nothing if CUDA is available.

`install()` changes megatron-core 0.16.1 in this process: it rewrites the names of CUDA devices and tensor types in the
functions listed in `_LITERALS`, points a few calls of `torch.cuda` at the CPU, and keeps the pipeline's sends alive.
Each place is listed, and one that is missing in another version of megatron-core raises instead of being skipped.
`packed_attention` replaces Transformer Engine's modules; the trainer uses `needed()` to choose.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import operator
import warnings
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any, Callable

import torch

_DEVICE_NAMES = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
# Functions whose bodies contain one of those names as a literal. A rewritten constant costs nothing at run time, unlike
# a TorchFunctionMode, which would run on every tensor operation of a step.
_LITERALS = {
    # the token counter of the schedules
    "megatron.core.pipeline_parallel.schedules": (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    ),
    # gradient norm and clipping: scalars, and the check of the gradients' type
    "megatron.core.utils": ("local_multi_tensor_l2_norm",),
    "megatron.core.optimizer.clip_grads": (
        "get_grad_norm_fp32", "clip_grad_by_total_norm_fp32", "count_zeros_fp32",
    ),
    # loss scale and overflow scalars; parameters sorted into fp32 and half groups by the name of their type
    "megatron.core.optimizer.grad_scaler": ("MegatronGradScaler.__init__",),
    "megatron.core.optimizer.optimizer": (
        "MixedPrecisionOptimizer.__init__", "Float16OptimizerWithFloat16Params.__init__", "FP32Optimizer.__init__",
    ),
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer._build_model_and_main_param_groups", "DistributedOptimizer.__init__",
    ),
    # distributed checkpointing: receive buffers, and the vote on reusing the global metadata
    "megatron.core.dist_checkpointing.exchange_utils": ("_get_empty_tensor_for_exchange",),
    "megatron.core.dist_checkpointing.strategies.state_dict_saver": ("verify_global_md_reuse",),
}


def needed() -> bool:
    """Whether this machine has no CUDA."""
    return not torch.cuda.is_available()


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Import Megatron inside this context. On a CPU its fused functions, which the model does not use here, stay plain
    Python. Megatron compiles them at import, and loading torch's compiler alone takes more than a second."""
    compiler = torch.compile
    if needed():
        _replace(torch, "compile", lambda function: function)
    try:
        yield
    finally:
        _replace(torch, "compile", compiler)


@functools.cache
def install() -> None:
    """Point Megatron's CUDA calls at the CPU. Idempotent; does nothing if CUDA is available."""
    if not needed():
        return
    for module_name, functions in _LITERALS.items():
        module = importlib.import_module(module_name)
        for name in functions:
            _rewrite_device_names(operator.attrgetter(name)(module))

    cpu = torch.device("cpu")
    # device=torch.cuda.current_device() in layers, mappings, p2p buffers, DDP buffers and the rotary embedding
    _replace(torch.cuda, "current_device", lambda: cpu)
    # after batched p2p, and around checkpoints
    _replace(torch.cuda, "synchronize", lambda device=None: None)
    _replace(torch.cuda, "empty_cache", lambda: None)
    # tied embeddings on two stages; tensors that arrive in a checkpoint load
    _replace(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    # Megatron's RNG tracker keeps a state per name (data parallel, model parallel) and forks into it
    _replace(torch.cuda, "manual_seed", torch.default_generator.manual_seed)
    _replace(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    _replace(torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    _replace(rng, "_get_cuda_rng_state", lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state())
    _replace(rng, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))
    # ... and warns that the CPU's state changes in the meantime, which is the same state here
    logging.getLogger(rng.__name__).setLevel(logging.ERROR)
    p2p = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    _replace(p2p, "_p2p_ops", _hold_sends(p2p._p2p_ops))
    # Megatron slices the frequencies document by document in Python; ours are packed (see PackedRotary)
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    _replace(rope, "_apply_rotary_pos_emb_thd", _rotate)
    warnings.filterwarnings("ignore", message="When using async grad allreduce .* CUDA_DEVICE_MAX_CONNECTIONS")
    # Megatron's names for collectives that torch 2.13 has renamed
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)


def _replace(owner: ModuleType | type, name: str, function: Callable) -> None:
    """An assignment that fails if the function has been renamed."""
    if not hasattr(owner, name):
        raise RuntimeError(f"{owner.__name__} has no {name} any more: megatron_rl.trainer.cpu was written for another "
                           "version (megatron-core 0.16.1, torch 2.13.0)")
    setattr(owner, name, function)


def _rewrite_device_names(function: Callable) -> None:
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = _replace_constants(function.__code__)
    if code == function.__code__:
        raise RuntimeError(f"{function.__module__}.{function.__qualname__} names no CUDA device any more: "
                           "megatron_rl.trainer.cpu was written for another megatron-core (0.16.1)")
    function.__code__ = code


def _replace_constants(value: Any) -> Any:
    if isinstance(value, CodeType):
        return value.replace(co_consts=tuple(map(_replace_constants, value.co_consts)))
    if isinstance(value, tuple):
        return tuple(map(_replace_constants, value))
    return _DEVICE_NAMES.get(value, value) if isinstance(value, str) else value


class _Send:
    """An unfinished send of the interleaved schedule. In the meantime, the schedule frees the tensor and drops the last
    handle without waiting. CUDA's allocator and streams allow that; gloo would read freed memory or lose messages."""

    unfinished: list[_Send] = []

    def __init__(self, request: torch.distributed.Work, tensor: torch.Tensor) -> None:
        self.request: torch.distributed.Work | None = request
        self.storage: torch.Tensor | None = tensor.detach()     # outlives `tensor.data = ...`
        _Send.unfinished = [*(send for send in _Send.unfinished if send.request), self]

    def wait(self) -> None:
        if self.request is not None:        # a second wait on a gloo send never returns
            self.request.wait()
        self.request = self.storage = None


def finish_sends() -> None:
    """Wait for sends of the interleaved schedule that it has not waited for. Call this after each pass."""
    for send in _Send.unfinished:
        send.wait()
    _Send.unfinished = []


def _hold_sends(p2p_ops: Callable[..., dict]) -> Callable[..., dict]:
    @functools.wraps(p2p_ops)
    def held(**tensors: Any) -> dict:
        requests = p2p_ops(**tensors)
        return {name: _Send(request, tensors[f"tensor_{name}"]) if name.startswith("send") else request
                for name, request in requests.items()}
    return held


def _rotate(t_Thd: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """RoPE on packed tokens [T, heads, d]. `freqs` comes from `PackedRotary`: cos and sin, [2, T, 1, d]."""
    cos, sin = freqs.to(t_Thd.dtype)
    first, second = t_Thd.chunk(2, dim=-1)
    return t_Thd * cos + torch.cat((-second, first), dim=-1) * sin
