"""Seeds: a function of run, step, prompt, instance and sample, without collisions between neighbours."""

from __future__ import annotations

import itertools

from megatron_rl.rollout.sampling import Sampling, engine_seed, group_seed, numbered
from tests.rollout.engines import make_prompts, run_config


def test_no_two_samples_of_a_run_share_a_seed():
    """With sums in place of a hash, step 1 sample 0 would be step 0 sample 1."""
    seeds = [group_seed(run, step, prompt, instance) + sample
             for run, step, prompt, instance, sample in itertools.product(range(2), range(12), range(12), range(2),
                                                                          range(16))]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0 and max(seeds) < 2 ** 63, "torch's generator takes an int64"


def test_the_seed_of_a_sample_never_changes():
    """Runs resume: the same values in another process, machine or version of this code."""
    assert group_seed(7, 3, 11, 0) == 3878414695741553008
    assert group_seed(7, 3, 11, 1) != group_seed(7, 3, 11, 0)


def test_no_two_engines_of_a_run_draw_alike():
    seeds = [engine_seed(run, attempt, replica) for run, attempt, replica in itertools.product(range(3), repeat=3)]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2 ** 31


def test_instances_count_the_repeats_of_a_row():
    a, b = make_prompts(2)
    drawn = numbered([a, b, a, a, b])
    assert [(each.index, each.instance) for each in drawn] == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1)]


def test_sampling_follows_the_configuration(tmp_path):
    config = run_config(tmp_path, temperature=0.7)
    assert Sampling.training(config) == Sampling(n=4, temperature=0.7, max_new_tokens=12)
    assert Sampling.greedy(config) == Sampling(n=1, temperature=0.0, max_new_tokens=12)
