from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.trainer import logprobs
from megatron_rl.trainer.logprobs import vocab_parallel_logprobs
from tests.ranks import Rank, run_ranks

T, VOCAB, PADDED, TEMPERATURE = 37, 150, 256, 0.7


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Logits with huge padding columns and extreme rows, labels, and weights for both outputs."""
    generator = torch.Generator().manual_seed(3)
    logits_TV = 4 * torch.randn(T, PADDED, generator=generator)
    logits_TV[:, VOCAB:] = 1e4
    logits_TV[0, :VOCAB] = -3e4
    logits_TV[1, 5] = 3e4
    labels_T = torch.randint(0, VOCAB, (T,), generator=generator)
    return logits_TV.to(dtype), labels_T, torch.randn(T, generator=generator), torch.randn(T, generator=generator)


def _truth(logits_TV: torch.Tensor, labels_T: torch.Tensor, a_T: torch.Tensor, b_T: torch.Tensor) -> tuple:
    """Log-probs, entropy and the gradient of sum(a logp + b H), in float64 over the true vocabulary."""
    x_TV = logits_TV.double()[:, :VOCAB].clone().requires_grad_()
    log_p = torch.log_softmax(x_TV / TEMPERATURE, -1)
    chosen, entropy = log_p.gather(1, labels_T[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (a_T * chosen + b_T * entropy).sum().backward()
    return chosen.detach(), entropy.detach(), torch.nn.functional.pad(x_TV.grad, (0, PADDED - VOCAB))


def _on_shard(logits_TV: torch.Tensor, labels_T: torch.Tensor, a_T: torch.Tensor, b_T: torch.Tensor, group=None):
    # A leaf cannot hand its storage to its own gradient: put an operation before it, as the output layer is.
    leaf = logits_TV.clone().requires_grad_()
    logits = leaf * 1.0
    chosen_T, entropy_T = vocab_parallel_logprobs(logits, labels_T, vocab=VOCAB, temperature=TEMPERATURE, group=group)
    (a_T * chosen_T + b_T * entropy_T).sum().backward()
    return chosen_T.detach(), entropy_T.detach(), leaf.grad


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_equals_float64_whatever_the_chunk(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", rows * PADDED)
    inputs = _inputs()
    for found, expected in zip(_on_shard(*inputs), _truth(*inputs), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("unused", ["entropy", "logprobs"])
def test_gradient_through_one_output_only(unused: str) -> None:
    logits_TV, labels_T, a_T, b_T = _inputs()
    a_T, b_T = (a_T, torch.zeros(T)) if unused == "entropy" else (torch.zeros(T), b_T)
    leaf = logits_TV.clone().requires_grad_()
    chosen_T, entropy_T = vocab_parallel_logprobs(leaf * 1.0, labels_T, vocab=VOCAB, temperature=TEMPERATURE)
    ((a_T * chosen_T) if unused == "entropy" else (b_T * entropy_T)).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), _truth(logits_TV, labels_T, a_T, b_T)[2], rtol=2e-5, atol=2e-5)


def test_bf16_logits_are_summed_in_fp32() -> None:
    inputs = _inputs(torch.bfloat16)
    found, expected = _on_shard(*inputs), _truth(*inputs)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found[2].double(), expected[2], rtol=1e-2, atol=1e-3)      # stored in bf16


def test_temperature_divides_logits_not_log_probs() -> None:
    logits_TV, labels_T, *_ = _inputs()
    hot, _ = vocab_parallel_logprobs(logits_TV[2:], labels_T[2:], vocab=VOCAB, temperature=2.0)
    cold, _ = vocab_parallel_logprobs(logits_TV[2:], labels_T[2:], vocab=VOCAB, temperature=1.0)
    assert not torch.allclose(hot, cold / 2.0, atol=0.1)
    expected_TV = torch.log_softmax(logits_TV[2:, :VOCAB] / 2, -1)
    torch.testing.assert_close(hot, expected_TV.gather(1, labels_T[2:, None])[:, 0])


class _LargestAllocation(TorchDispatchMode):
    """Bytes of the largest storage that an operation made (views and in-place results are not new)."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known, self.largest = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_full_size_logits_is_ever_made(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, chunk = 512, 1024, 32
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", chunk * width)
    leaf = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    logits = leaf * 1.0
    with _LargestAllocation(logits) as allocations:
        chosen_T, entropy_T = vocab_parallel_logprobs(logits, torch.zeros(rows, dtype=torch.long), vocab=1000,
                                                      temperature=1.0)
        (gradient,) = torch.autograd.grad((chosen_T + entropy_T).sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr(), "the gradient must lie in the logits' own storage"
    assert allocations.largest <= chunk * width * 4, "only one chunk in fp32 at a time"


def _sharded(rank: Rank, inputs: tuple) -> tuple:
    import torch.distributed as dist

    rank.init_gloo()
    logits_TV, *rest = inputs
    return _on_shard(logits_TV.chunk(rank.world, 1)[rank.rank], *rest, group=dist.group.WORLD)


def test_shards_of_four_ranks_one_of_them_all_padding() -> None:
    inputs = _inputs()
    results = run_ranks(4, _sharded, inputs)          # 64 columns each: 150 ends inside the third
    chosen_T, entropy_T, grad_TV = _truth(*inputs)
    for found in results:
        torch.testing.assert_close(found[0].double(), chosen_T, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(found[1].double(), entropy_T, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(torch.cat([found[2] for found in results], 1).double(), grad_TV, rtol=2e-5, atol=2e-5)
