"""Vocabulary-parallel log-probs on the device against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.trainer.logprobs import vocab_parallel_logprobs

T, VOCAB, PADDED, TEMPERATURE = 301, 32_000, 32_128, 0.7


def assert_equals_float64(device: str, dtype: torch.dtype) -> None:
    """Values, entropy and the gradient of sum(a logp + b H); padding columns are huge and must not count."""
    generator = torch.Generator().manual_seed(3)
    logits_TV = 4 * torch.randn(T, PADDED, generator=generator)
    logits_TV[:, VOCAB:] = 1e4
    logits_TV[0, :VOCAB] = -3e4
    logits_TV[1, 5] = 3e4
    logits_TV = logits_TV.to(dtype)
    labels_T = torch.randint(0, VOCAB, (T,), generator=generator)
    a_T, b_T = torch.randn(T, generator=generator), torch.randn(T, generator=generator)

    exact_TV = logits_TV[:, :VOCAB].double().requires_grad_()
    log_p = torch.log_softmax(exact_TV / TEMPERATURE, -1)
    chosen_T, entropy_T = log_p.gather(1, labels_T[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (a_T * chosen_T + b_T * entropy_T).sum().backward()

    leaf = logits_TV.to(device).requires_grad_()
    found_T, found_entropy_T = vocab_parallel_logprobs(leaf * 1.0, labels_T.to(device), vocab=VOCAB,
                                                       temperature=TEMPERATURE)
    (a_T.to(device) * found_T + b_T.to(device) * found_entropy_T).sum().backward()
    torch.testing.assert_close(found_T.cpu().double(), chosen_T.detach(), rtol=2e-5, atol=5e-5)
    torch.testing.assert_close(found_entropy_T.cpu().double(), entropy_T.detach(), rtol=2e-5, atol=5e-5)
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(leaf.grad[:, :VOCAB].cpu().double(), exact_TV.grad, **tolerance)
    assert (leaf.grad[:, VOCAB:] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_float64(dtype: torch.dtype) -> None:
    assert_equals_float64("cuda", dtype)


@pytest.mark.gpu
def test_no_second_full_size_logits_is_ever_made() -> None:
    """What the docstring promises: the logits, three buffers of a chunk, and little else."""
    rows, width = 4096, 32_000
    leaf = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    logits = leaf * 1.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen_T, entropy_T = vocab_parallel_logprobs(logits, torch.zeros(rows, dtype=torch.long, device="cuda"),
                                                  vocab=width, temperature=1.0)
    (gradient,) = torch.autograd.grad((chosen_T + entropy_T).sum(), logits)
    torch.cuda.synchronize()
    assert gradient.data_ptr() == logits.data_ptr(), "the gradient must lie in the logits' own storage"
    assert torch.cuda.max_memory_allocated() - before < (3 * 64 + 32) * 2**20
