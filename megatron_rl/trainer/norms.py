"""Norms that Megatron-core 0.16.1 does not have: of the outputs of attention and MLP, and of a whole query or key
projection whose heads are on several TP ranks. They run on GPUs and CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

BiasDropoutAdd = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


class NormThenAdd(torch.nn.Module):
    """residual + norm(output), instead of Megatron's bias-dropout-add. There is neither bias nor dropout."""

    def __init__(self, norm: ModuleSpec | type, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> BiasDropoutAdd:
        return self._add

    def _add(self, output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor,
             dropout: float) -> torch.Tensor:
        return residual + self.norm(output_with_bias[0])


class WholeProjectionNorm(torch.nn.Module):
    """RMSNorm over all heads of a query or key projection, computed in fp32. Each TP rank holds its heads' weights. The
    sum of squares is taken over the group, and each rank has a part of its gradient."""

    def __init__(self, heads: int, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__()
        self.width, self.eps, self.tp = heads * hidden_size, eps, config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(self.width // self.tp, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads / TP, d]."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.tp > 1:
            squares = _SumOverGroup.apply(squares, parallel_state.get_tensor_model_parallel_group())
        wide = wide * torch.rsqrt(squares / self.width + self.eps) * self.weight.float()
        return wide.to(x.dtype).view_as(x)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Tell Megatron that a checkpoint concatenates the ranks' weights."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True))


class _SumOverGroup(torch.autograd.Function):
    """The sum over a group, in the forward and in the backward pass. Each rank uses the sum for heads of its own,
    whereas Megatron's `reduce_from_tensor_model_parallel_region` assumes that all ranks compute the same from it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group), None


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out
