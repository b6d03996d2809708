"""Coefficients of CPU cores, for a run on a machine that no cluster file describes. The H100 values of the other
modules are ten times too slow for models and batches of this size.

`megatron-rl plan calibrate` and `megatron-rl sync bench` measured those of configs/clusters/local-cpu.yaml
(docs/calibration.md). They are repeated here because a package cannot read the repository's configurations. A test
compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

SOURCE = "measured on 2 cores of an EPYC: configs/clusters/local-cpu.yaml (docs/calibration.md)"
MEASURED: Mapping[str, float] = {
    "coefficients.rl.train_efficiency": 0.557454,
    "coefficients.rl.train_efficiency_low": 0.470709,
    "coefficients.rl.train_efficiency_high": 0.638819,
    "coefficients.rl.update_s": 0.0,
    "coefficients.rl.logprob_factor": 0.874157,
    "coefficients.rl.logprob_factor_low": 0.744175,
    "coefficients.rl.logprob_factor_high": 0.992233,
    "coefficients.rl.rollout_efficiency": 1.86439,
    "coefficients.rl.rollout_efficiency_low": 1.37518,
    "coefficients.rl.rollout_efficiency_high": 2.14168,
    "coefficients.rl.response_s": 0.000234152,
    "coefficients.sync.pause_s": 0.0154903,
    "coefficients.sync.barrier_s": 0.00433729,
    "coefficients.sync.copy_rate": 1.95e10,
    "coefficients.sync.digest_rate": 1.91e10,
}
"""By key, as in a cluster file's `coefficients`."""
