"""Each detector on a history that shows its fault, and all of them silent on a healthy one."""

from __future__ import annotations

import math
import random

import pytest

from megatron_rl.monitor.divergence import DETECTORS, Detectors


def healthy(steps: int = 120, seed: int = 0) -> list[dict]:
    """A run that learns: reward 0.1 to 0.95, entropy down to 0.05, at the end nearly all groups equal."""
    rng = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        learned = 1 / (1 + math.exp(-(step - 50) / 12))
        rows.append({"step": step, "reward/mean": 0.1 + 0.85 * learned + rng.gauss(0, 0.04),
                     "train/entropy": 3 * (1 - learned) + 0.05, "group/zero_variance": 0.2 + 0.8 * learned,
                     "mismatch/kl": 1e-3 * rng.uniform(0.5, 2), "train/grad_norm": rng.lognormvariate(0, 0.5),
                     "response/truncated": 0.3 * (1 - learned), "reward/errors": rng.choice([0.0, 0.02])})
    return rows


def codes(rows: list[dict]) -> set[str]:
    watch = Detectors()
    return {finding.code for row in rows for finding in watch.check(row)}


@pytest.mark.parametrize("seed", range(5))
def test_healthy_run_is_silent(seed):
    assert codes(healthy(seed=seed)) == set()


def faulty(change) -> list[dict]:
    rows = healthy()
    for row in rows[60:]:
        row |= change(row)
    return rows


@pytest.mark.parametrize(("code", "rows"), [
    ("NON_FINITE", faulty(lambda row: {"train/loss": float("nan")})),
    ("REWARD_COLLAPSE", faulty(lambda row: {"reward/mean": 0.1 + 0.01 * (row["step"] % 3), "train/entropy": 1.0,
                                             "group/zero_variance": 0.5})),
    ("MISMATCH", faulty(lambda row: {"mismatch/kl": 1e-3 * 1.3 ** (row["step"] - 60)})),
    ("GRAD_NORM", faulty(lambda row: {"train/grad_norm": 40.0 + row["step"]})),
    ("TRUNCATION", faulty(lambda row: {"response/truncated": 0.8})),
    ("REWARD_ERRORS", faulty(lambda row: {"reward/errors": 0.1})),
    ("ENTROPY_COLLAPSE", [{"step": s, "reward/mean": 0.1, "train/entropy": 4 * 0.8 ** s} for s in range(1, 40)]),
    ("NO_SIGNAL", [{"step": s, "reward/mean": 0.0, "group/zero_variance": 1.0} for s in range(1, 20)]),
], ids=lambda value: value if isinstance(value, str) else "")
def test_fault_is_found_with_evidence(code, rows):
    watch = Detectors()
    findings = [finding for row in rows for finding in watch.check(row)]
    assert {finding.code for finding in findings} == {code}
    assert findings[0].evidence and code in str(findings[0])


def test_mismatch_that_is_wrong_from_the_first_steps_is_found_early():
    rows = [{"step": s, "mismatch/kl": 0.5} for s in range(1, 4)]
    assert codes(rows) == {"MISMATCH"}


def test_drift_alone_is_no_mismatch():
    """Swaps at the border with batches ahead: from step 2 on no token has the trainer's version, so `mismatch/*` is
    absent, and the policy's own drift grows. If engine and trainer do differ, only steps with current tokens tell."""
    rows = [{"step": 1, "mismatch/kl": 1e-4}]
    rows += [{"step": s, "drift/kl": 0.04 * s, "drift/abs_mean": 0.3, "drift/divergence": 0.5} for s in range(2, 60)]
    assert codes(rows) == set()
    for row in rows[40:50]:
        row["mismatch/kl"] = 0.2
    assert codes(rows) == {"MISMATCH"}


def test_a_teacher_is_a_signal_without_rewards_and_may_be_deterministic():
    rows = [{"step": s, "reward/mean": 0.0, "group/zero_variance": 1.0, "train/entropy": 4 * 0.8 ** s}
            for s in range(1, 40)]
    assert codes(rows) == {"NO_SIGNAL", "ENTROPY_COLLAPSE"}
    assert codes([row | {"distill/kl": 1.0} for row in rows]) == set()


def test_the_same_code_is_not_told_every_step():
    watch = Detectors(quiet_steps=50)
    told = [finding.step for step in range(1, 121) for finding in watch.check({"step": step, "train/loss": math.nan})]
    assert told == [1, 51, 101]


def test_detectors_say_nothing_of_metrics_that_are_absent():
    history = [{"step": step} for step in range(1, 60)]
    assert [detector(history) for detector in DETECTORS] == [None] * len(DETECTORS)
