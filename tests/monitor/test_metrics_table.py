from __future__ import annotations

from pathlib import Path

import torch

from launch.config.schema import Algorithm
from launch.run.metrics import SPLIT
from megatron_rl.algorithms.mismatch import means
from megatron_rl.algorithms.objective import token_objective
from megatron_rl.algorithms.sequences import Sequences
from megatron_rl.monitor import metrics
from megatron_rl.monitor.metrics import check_names, lookup

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_page_is_the_table():
    assert PAGE.read_text(encoding="utf-8") == metrics.markdown(), "run `make docs`"


def test_names_are_unique_and_rows_complete():
    names = [metric.name for metric in metrics.ALL]
    assert len(names) == len(set(names))
    for metric in metrics.ALL:
        assert metric.meaning and metric.unit, metric
        assert "|" not in metric.name


def test_report_draws_only_names_of_the_table():
    charts = (Path(__file__).parents[2] / "launch" / "report" / "run" / "charts.py").read_text(encoding="utf-8")
    drawn = [word for word in charts.split('"') if "/" in word and " " not in word and "<" not in word]
    assert len(drawn) > 10
    for name in [*drawn, *(name for name, _ in SPLIT)]:
        assert lookup(name) is not None, name


def _rows_of_the_objective() -> set[str]:
    """Rows of what the trainer's objective tells about tokens of every age and position; every name must have one."""
    generator, rows = torch.Generator().manual_seed(0), set()
    ages_T = torch.arange(20) % 5
    for rejection in ({"rule": "icepop"}, {"rule": "sequence"}):
        config = Algorithm.model_validate({"group_size": 2, "prompts_per_step": 2, "rejection": rejection,
                                           "distillation": {"teacher": "teacher"}})
        _, sums = token_objective(
            config, logprobs_T=torch.randn(20, generator=generator), entropy_T=None, advantages_T=torch.ones(20),
            weights_T=torch.ones(20), behaviour_logprobs_T=torch.randn(20, generator=generator), old_logprobs_T=None,
            reference_logprobs_T=None, teacher_logprobs_T=torch.randn(20, generator=generator), ages_T=ages_T,
            positions_T=torch.arange(20) // 5 * 6000, sequences=Sequences(ages_T, 5))
        found = {name: lookup(name) for name in means({name: value.item() for name, value in sums.items()})}
        assert not [name for name, row in found.items() if row is None]
        rows |= {row.name for row in found.values()}
    return rows


def test_table_holds_nothing_that_nobody_logs():
    package = Path(metrics.__file__).parents[1]
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path.parent.name != "monitor"]
    logged = {metric.name for metric in metrics.ALL
              if any(f'"{metric.name.split("<")[0]}' in text for text in sources)}
    added_by_the_writer = {"step", "timestamp"}
    assert {metric.name for metric in metrics.ALL} - logged - _rows_of_the_objective() <= added_by_the_writer


def test_unknown_name_warns_once(caplog):
    warned: set[str] = set()
    for _ in range(3):
        check_names(["reward/mean", "reward/maen"], warned)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "'reward/maen' is not in the table" in record.message
    assert "did you mean 'reward/mean'?" in record.message


def test_family_takes_one_level_only():
    assert lookup("reward/component/exact_match") is not None
    assert lookup("reward/component/my_pkg.rewards:score") is not None
    assert lookup("reward/component/") is None
    assert lookup("reward/component/a/b") is None
