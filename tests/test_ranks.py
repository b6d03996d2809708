from __future__ import annotations

import time

import pytest

from tests.ranks import Rank, RankError, run_ranks


def _sum(rank: Rank, factor: int) -> float:
    import torch
    import torch.distributed as dist

    rank.init_gloo()
    x = torch.tensor([float(rank.rank * factor)])
    dist.all_reduce(x)
    return x.item()


def _one_fails(rank: Rank) -> None:
    import torch
    import torch.distributed as dist

    rank.init_gloo()
    if rank.rank == 1:
        raise KeyError("the original mistake")
    dist.all_reduce(torch.ones(1))


def _one_hangs(rank: Rank) -> int:
    if rank.rank == 1:
        time.sleep(60)
    return rank.rank


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(3, _sum, 2) == [6.0, 6.0, 6.0]


def test_first_failure_is_the_one_that_is_shown() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first(.|\n)*the original mistake"):
        run_ranks(2, _one_fails)


def test_deadline_names_the_missing_rank_and_its_stack() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] did not answer(.|\n)*_one_hangs"):
        run_ranks(2, _one_hangs, timeout=4)
