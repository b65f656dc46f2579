"""Divergence PPO: the mask on differences of probabilities."""

from __future__ import annotations

import math

import numpy as np

from clotho.training.objectives.token_level import dppo_tv
from tests.learner_settings import learner_settings
from tests.training.objectives.random_inputs import random_tokens, row, teach, tokens


def test_dppo_tv_by_hand() -> None:
    """mu = 0.2, delta 0.2 and 0.3, tau = 1/2. Loss -k A r + tau (ln r)^2; gradient -k A r + 2 tau ln r.

    pi = 0.6, A = 1: rose by 0.4 > 0.3, masked: loss (ln 3)^2 / 2, gradient ln 3.
    pi = 0.6, A = -1: on its way back, kept: 3 + (ln 3)^2 / 2, gradient 3 + ln 3.
    pi = 0.4, A = 1: rose by 0.2, kept although r = 2: -2 + (ln 2)^2 / 2, gradient -2 + ln 2.
    """
    logp_N, A_N = row(np.log([0.6, 0.6, 0.4])), [1.0, -1.0, 1.0]
    seen = tokens(A_N, rollout_logp_N=[math.log(0.2)] * 3, old_logp_N=[-7.0] * 3)
    taught = teach(
        dppo_tv, logp_N, seen, learner_settings(objective="dppo_tv", clip_low=0.2, clip_high=0.3, quadratic_kl=0.5)
    )
    a, b = math.log(3), math.log(2)
    np.testing.assert_allclose(taught.loss_N, [a * a / 2, 3 + a * a / 2, -2 + b * b / 2], rtol=1e-5)
    np.testing.assert_allclose(taught.gradient_N, [a, 3 + a, -2 + b], rtol=1e-5)
    assert taught.clipped_N.tolist() == [True, False, False]


def test_bad_tokens_that_fell_far_are_masked() -> None:
    """mu = 0.5, pi = 0.2, delta_low = 0.2: A = -1 teaches nothing more; A = 1 still does, -r = -0.4."""
    seen = tokens([-1.0, 1.0], rollout_logp_N=[math.log(0.5)] * 2)
    taught = teach(
        dppo_tv, row(np.log([0.2, 0.2])), seen, learner_settings(objective="dppo_tv", clip_low=0.2, quadratic_kl=0.0)
    )
    np.testing.assert_allclose(taught.gradient_N, [0.0, -0.4], rtol=1e-5)
    assert taught.clipped_N.tolist() == [True, False]


def test_rare_tokens_may_move_by_any_factor() -> None:
    """From 1e-4 to 1e-2 the ratio is 100, the difference 0.0099: kept, where PPO would have clipped. Gradient -100."""
    taught = teach(
        dppo_tv,
        row([math.log(1e-2)]),
        tokens([1.0], rollout_logp_N=[math.log(1e-4)]),
        learner_settings(objective="dppo_tv"),
    )
    np.testing.assert_allclose(taught.gradient_N, [-100 + 2e-3 * math.log(100)], rtol=1e-4)


def test_dppo_tv_with_clips_of_one_is_importance_sampling() -> None:
    """Probabilities never differ by more than 1: without the quadratic term, loss and gradient are -A r."""
    logp_N, seen = random_tokens(40)
    taught = teach(
        dppo_tv, logp_N, seen, learner_settings(objective="dppo_tv", clip_low=1.0, clip_high=1.0, quadratic_kl=0.0)
    )
    expected_N = np.array(-seen.advantage_N * np.exp(np.array(logp_N - seen.rollout_logp_N)))
    np.testing.assert_allclose(taught.loss_N, expected_N, rtol=1e-5)
    np.testing.assert_allclose(taught.gradient_N, expected_N * np.array(seen.loss_mask_N), rtol=1e-5)
