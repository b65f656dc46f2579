"""Objectives with token-level ratios: the clipped surrogate, dual clip, REINFORCE, CISPO, SAPO and DPPO."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clotho.settings.learner import LearnerSection
from clotho.settings.objectives import Bnpo, Dapo, DrGrpo, Grpo, ObjectiveSettings, PpoDecoupled, ReinforcePlusPlus
from clotho.training.objectives.functions import (
    OBJECTIVES,
    cispo,
    clipped_surrogate,
    dppo_tv,
    reinforce,
    sapo,
)
from clotho.training.objectives.importance_correction import truncate
from tests.learner_settings import learner_settings
from tests.training.objectives.objective_inputs import (
    OLD_LOGP,
    at_ratio,
    evaluate_objective,
    float_array,
    random_tokens,
    tokens,
)

SETTINGS = learner_settings(clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize(
    ("ratio", "A", "loss", "gradient", "clipped"),
    [
        (1.0, 1.5, -1.5, -1.5, False),
        (1.0, -1.5, 1.5, 1.5, False),
        (1.5, 2.0, -2.56, 0.0, True),
        (1.25, 2.0, -2.5, -2.5, False),
        (0.5, 2.0, -1.0, -1.0, False),
        (0.5, -2.0, 1.6, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
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


def test_dual_clip_beyond_all_ratios_has_no_effect() -> None:
    """Ratios stay below 1000, so c = 1000 changes nothing."""
    logp_N, seen = random_tokens(40)
    plain = evaluate_objective(clipped_surrogate, logp_N, seen, SETTINGS)
    far = evaluate_objective(
        clipped_surrogate, logp_N, seen, learner_settings(clip_low=0.2, clip_high=0.28, dual_clip=1000.0)
    )
    assert plain.clipped_N.any()
    for one, other in zip(plain, far, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", [Grpo, DrGrpo, Bnpo, Dapo, ReinforcePlusPlus, PpoDecoupled])
def test_objectives_with_the_same_formula_have_the_same_function(kind: type[ObjectiveSettings]) -> None:
    """They differ only in their other settings."""
    assert OBJECTIVES[kind] is clipped_surrogate


def test_a_token_of_probability_zero_has_a_finite_loss() -> None:
    """A log-ratio of 500 nats is clamped to 20: the loss is at most e^20, and its gradient is 0."""
    seen = tokens([-1.0, 1.0], old_logp_N=[-500.0, 0.0])
    result = evaluate_objective(clipped_surrogate, float_array([0.0, -500.0]), seen, SETTINGS)
    np.testing.assert_allclose(result.loss_N, [np.exp(20.0), -np.exp(-20.0)], rtol=1e-5)
    assert result.gradient_N.tolist() == [0.0, 0.0]


def test_reinforce_by_hand() -> None:
    """log pi = -1 and -3, A = 2 and -0.5: losses 2 and -1.5, gradients -A, independent of the old policy."""
    result = evaluate_objective(
        reinforce, float_array([-1.0, -3.0]), tokens([2.0, -0.5], old_logp_N=[-9.0, -0.1]), LearnerSection()
    )
    np.testing.assert_allclose(result.loss_N, [2.0, -1.5])
    np.testing.assert_allclose(result.gradient_N, [-2.0, 0.5])
    assert not result.clipped_N.any()


def test_cispo_by_hand() -> None:
    """Range [0.5, 2]: ratios 3, 1/4, 1.5 give weights 2, 1/2, 1.5.

    L = -w A log pi with gradient -w A, never 0. The first with A = 1: loss -2 (OLD_LOGP + ln 3), gradient -2. Clipped
    tokens are counted.
    """
    result = evaluate_objective(
        cispo,
        at_ratio([3.0, 0.25, 1.5]),
        tokens([1.0, -1.0, 2.0]),
        learner_settings(objective="cispo", clip_low=0.5, clip_high=1.0),
    )
    logp_N = OLD_LOGP + np.log([3.0, 0.25, 1.5])
    np.testing.assert_allclose(result.loss_N, [-2 * logp_N[0], 0.5 * logp_N[1], -3 * logp_N[2]], rtol=1e-5)
    np.testing.assert_allclose(result.gradient_N, [-2.0, 0.5, -3.0], rtol=1e-5)
    assert result.clipped_N.tolist() == [True, True, False]


def test_cispo_without_a_lower_bound_is_truncated_importance_sampling() -> None:
    """clip_low = 1: the weight is min(r, 1 + clip_high), as TIS against the same old policy."""
    logp_N, seen = random_tokens(40)
    result = evaluate_objective(cispo, logp_N, seen, learner_settings(objective="cispo", clip_low=1.0, clip_high=0.2))
    weight_N = np.array(truncate(logp_N - seen.old_logp_N, seen, 0.0, 1.2))
    plain = evaluate_objective(reinforce, logp_N, seen, LearnerSection())
    assert (weight_N == np.float32(1.2)).any()
    np.testing.assert_allclose(result.gradient_N, weight_N * plain.gradient_N, rtol=1e-5)
    np.testing.assert_allclose(result.loss_N, weight_N * plain.loss_N, rtol=1e-5)


SAPO_SETTINGS = learner_settings(objective="sapo", sapo_tau_pos=1.0, sapo_tau_neg=2.0)


def test_sapo_by_hand() -> None:
    """A = 3, r = 1 + ln 3, tau 1: sigmoid(ln 3) = 3/4, L = -4 * 3/4 * 3 = -9; gradient -A r 4 p (1 - p) = -9/4 r.

    A = -3, r = 1 + ln(3) / 2, tau 2: sigmoid(ln 3) = 3/4, L = 4/2 * 3/4 * 3 = 4.5; gradient 9/4 r.
    """
    ratio_N = [1 + math.log(3), 1 + math.log(3) / 2]
    result = evaluate_objective(sapo, at_ratio(ratio_N), tokens([3.0, -3.0]), SAPO_SETTINGS)
    np.testing.assert_allclose(result.loss_N, [-9.0, 4.5], rtol=1e-5)
    np.testing.assert_allclose(result.gradient_N, [-2.25 * ratio_N[0], 2.25 * ratio_N[1]], rtol=1e-5)


@pytest.mark.parametrize("A", [2.0, -2.0])
def test_sapo_at_ratio_one_is_the_policy_gradient(A: float) -> None:
    """For every temperature the gradient is -A, and the value is -2 A / tau."""
    result = evaluate_objective(sapo, at_ratio([1.0]), tokens([A]), SAPO_SETTINGS)
    assert result.gradient_N[0] == pytest.approx(-A, rel=1e-6)
    assert result.loss_N[0] == pytest.approx(-2 * A / (1.0 if A > 0 else 2.0), rel=1e-6)


def test_the_gate_of_sapo_decreases_faster_for_negative_advantages() -> None:
    """At r = 4 the gradient per r is 4 p (1 - p) |A|: 0.181 with tau 1, and 0.00987 with tau 2."""
    result = evaluate_objective(sapo, at_ratio([4.0, 4.0]), tokens([1.0, -1.0]), SAPO_SETTINGS)
    np.testing.assert_allclose(np.abs(result.gradient_N) / 4, [0.180707, 0.009866], rtol=1e-4)


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


def test_dppo_tv_masks_tokens_that_decreased_too_far() -> None:
    """mu = 0.5, pi = 0.2, delta_low = 0.2: A = -1 has no gradient. A = 1 has gradient -r = -0.4."""
    seen = tokens([-1.0, 1.0], rollout_logp_N=[math.log(0.5)] * 2)
    result = evaluate_objective(
        dppo_tv,
        float_array(np.log([0.2, 0.2])),
        seen,
        learner_settings(objective="dppo_tv", clip_low=0.2, quadratic_kl=0.0),
    )
    np.testing.assert_allclose(result.gradient_N, [0.0, -0.4], rtol=1e-5)
    assert result.clipped_N.tolist() == [True, False]


def test_rare_tokens_may_change_by_any_ratio() -> None:
    """From 1e-4 to 1e-2 the ratio is 100 and the difference 0.0099: not masked, although PPO clips it.

    Gradient -100.
    """
    result = evaluate_objective(
        dppo_tv,
        float_array([math.log(1e-2)]),
        tokens([1.0], rollout_logp_N=[math.log(1e-4)]),
        learner_settings(objective="dppo_tv"),
    )
    np.testing.assert_allclose(result.gradient_N, [-100 + 2e-3 * math.log(100)], rtol=1e-4)


def test_dppo_tv_with_ranges_of_one_is_importance_sampling() -> None:
    """Probabilities never differ by more than 1. Without the quadratic term, loss and gradient are -A r."""
    logp_N, seen = random_tokens(40)
    result = evaluate_objective(
        dppo_tv, logp_N, seen, learner_settings(objective="dppo_tv", clip_low=1.0, clip_high=1.0, quadratic_kl=0.0)
    )
    expected_N = np.array(-seen.advantage_N * np.exp(np.array(logp_N - seen.rollout_logp_N)))
    np.testing.assert_allclose(result.loss_N, expected_N, rtol=1e-5)
    np.testing.assert_allclose(result.gradient_N, expected_N * np.array(seen.loss_mask_N), rtol=1e-5)
