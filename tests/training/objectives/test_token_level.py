"""Objectives with token-level ratios: the clipped surrogate, dual clip, REINFORCE, CISPO, SAPO and DPPO."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clotho.training.objectives.functions import clipped_surrogate, dppo_tv
from tests.learner_settings import learner_settings
from tests.training.objectives.objective_inputs import at_ratio, evaluate_objective, float_array, tokens

SETTINGS = learner_settings(clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize(
    ("ratio", "A", "loss", "gradient", "clipped"),
    [
        (1.0, 1.5, -1.5, -1.5, False), (1.0, -1.5, 1.5, 1.5, False), (1.5, 2.0, -2.56, 0.0, True),
        (1.25, 2.0, -2.5, -2.5, False), (0.5, 2.0, -1.0, -1.0, False), (0.5, -2.0, 1.6, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False), (1.5, 0.0, 0.0, 0.0, False),
    ],
)  # fmt: skip
def test_the_clipped_surrogate_by_hand(ratio: float, A: float, loss: float, gradient: float, clipped: bool) -> None:
    """Range [0.8, 1.28]: L = -min(r A, clip(r) A); dL/dlogp = -r A where free and 0 where clipped.

    For example r = 1.5, A = 2: -min(3, 1.28 * 2) = -2.56, flat. r = 1.5, A = -2: -min(-3, -2.56) = 3, slope 3.
    """
    result = evaluate_objective(clipped_surrogate, at_ratio([ratio]), tokens([A]), SETTINGS)
    assert result.loss_N[0] == pytest.approx(loss, rel=1e-6)
    assert result.gradient_N[0] == pytest.approx(gradient, rel=1e-6)
    assert result.clipped_N[0] == clipped


def test_dual_clip_bounds_the_loss_at_negative_advantages() -> None:
    """c = 3, A = -2: at r = 5 the loss 10 becomes c |A| = 6, flat; at r = 2 it stays 4, slope 4.

    A = +2 is never touched: at r = 1/10 the loss is -0.2, slope -0.2.
    """
    result = evaluate_objective(
        clipped_surrogate,
        at_ratio([5.0, 2.0, 0.1]),
        tokens([-2.0, -2.0, 2.0]),
        learner_settings(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    )
    np.testing.assert_allclose(result.loss_N, [6.0, 4.0, -0.2], rtol=1e-6)
    np.testing.assert_allclose(result.gradient_N, [0.0, 4.0, -0.2], rtol=1e-6)
    assert result.clipped_N.tolist() == [True, False, False]


def test_a_token_of_probability_zero_has_a_finite_loss() -> None:
    """A log-ratio of 500 nats is clamped to 20: the loss is at most e^20, and its gradient is 0."""
    seen = tokens([-1.0, 1.0], old_logp_N=[-500.0, 0.0])
    result = evaluate_objective(clipped_surrogate, float_array([0.0, -500.0]), seen, SETTINGS)
    np.testing.assert_allclose(result.loss_N, [np.exp(20.0), -np.exp(-20.0)], rtol=1e-5)
    assert result.gradient_N.tolist() == [0.0, 0.0]


def test_dppo_tv_by_hand() -> None:
    """mu = 0.2, delta 0.2 and 0.3, tau = 1/2. Loss -k A r + tau (ln r)^2; gradient -k A r + 2 tau ln r.

    pi = 0.6, A = 1: rose by 0.4 > 0.3, masked: loss (ln 3)^2 / 2, gradient ln 3.
    pi = 0.6, A = -1: on its way back, kept: 3 + (ln 3)^2 / 2, gradient 3 + ln 3.
    pi = 0.4, A = 1: rose by 0.2, kept although r = 2: -2 + (ln 2)^2 / 2, gradient -2 + ln 2.
    """
    logp_N, A_N = float_array(np.log([0.6, 0.6, 0.4])), [1.0, -1.0, 1.0]
    seen = tokens(A_N, rollout_logp_N=[math.log(0.2)] * 3, old_logp_N=[-7.0] * 3)
    result = evaluate_objective(
        dppo_tv, logp_N, seen, learner_settings(objective="dppo_tv", clip_low=0.2, clip_high=0.3, quadratic_kl=0.5)
    )
    a, b = math.log(3), math.log(2)
    np.testing.assert_allclose(result.loss_N, [a * a / 2, 3 + a * a / 2, -2 + b * b / 2], rtol=1e-5)
    np.testing.assert_allclose(result.gradient_N, [a, 3 + a, -2 + b], rtol=1e-5)
    assert result.clipped_N.tolist() == [True, False, False]
