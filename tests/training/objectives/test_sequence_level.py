"""Objectives with the ratio of the whole completion."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clotho.training.objectives.contract import Objective
from clotho.training.objectives.functions import gspo, gspo_token, require_exact_ratio, rloo
from clotho.training.objectives.loss import loss_weights
from protocols.errors import ProfileError
from tests.learner_settings import learner_settings
from tests.training.objectives.objective_inputs import at_ratio, evaluate_objective, float_array, random_tokens, tokens

WIDE = learner_settings(clip_low=0.9, clip_high=9.0)
RATIOS = [2.0, 8.0, 3.0]
"""Two tokens of completion 0, one of completion 1."""


def test_gspo_by_hand() -> None:
    """Completion 0: s = sqrt(2 * 8) = 4; completion 1: s = 3.

    A = (0.5, -1), unclipped: losses -2, -2 and 3. Gradient of their sum: completion 0 has 2 tokens of loss -s A,
    ds/dlogp_t = s / 2, so -2 for each; completion 1: 3.
    """
    result = evaluate_objective(gspo, at_ratio(RATIOS), tokens([0.5, 0.5, -1.0], sequence_N=[0, 0, 1]), WIDE)
    np.testing.assert_allclose(result.loss_N, [-2.0, -2.0, 3.0], rtol=1e-5)
    np.testing.assert_allclose(result.gradient_N, [-2.0, -2.0, 3.0], rtol=1e-5)
    assert not result.clipped_N.any()


def test_gspo_clips_whole_completions() -> None:
    """Range [1 - 3e-4, 1 + 4e-4]: ratios 1.1 and 1/1.1 cancel, s = 1, unclipped; s = 1.01, A = 1 gives -1.0004,
    gradient 0.
    """
    settings = learner_settings(clip_low=3e-4, clip_high=4e-4)
    seen = tokens([1.0, 1.0, 1.0], sequence_N=[0, 0, 1])
    result = evaluate_objective(gspo, at_ratio([1.1, 1 / 1.1, 1.01]), seen, settings)
    np.testing.assert_allclose(result.loss_N, [-1.0, -1.0, -1.0004], rtol=1e-6)
    np.testing.assert_allclose(result.gradient_N, [-1.0, -1.0, 0.0], rtol=1e-5)
    assert result.clipped_N.tolist() == [False, False, True]


def test_gspo_token_has_the_sequence_value_and_the_token_gradient() -> None:
    """s = 4, advantages 0.5 and -1 within the completion: losses -2 and 4, gradients -s A = -2 and 4."""
    result = evaluate_objective(gspo_token, at_ratio([2.0, 8.0]), tokens([0.5, -1.0]), WIDE)
    np.testing.assert_allclose(result.loss_N, [-2.0, 4.0], rtol=1e-5)
    np.testing.assert_allclose(result.gradient_N, [-2.0, 4.0], rtol=1e-5)


def test_gspo_token_clamps_its_log_ratio_to_ten_nats() -> None:
    """A mean log-ratio of 15 and A = -1: the loss is e^10, without a gradient."""
    result = evaluate_objective(gspo_token, float_array([-1.0]), tokens([-1.0], old_logp_N=[-16.0]), WIDE)
    np.testing.assert_allclose(result.loss_N, [math.exp(10.0)], rtol=1e-5)
    assert result.gradient_N.tolist() == [0.0]


def test_gspo_and_gspo_token_agree_for_constant_advantages() -> None:
    """Loss and gradient with sequence_mean, with some completions clipped."""
    logp_N, seen = random_tokens(40, sequences=6)
    lengths = np.array(seen.sum_B(float_array([1.0] * 40))).astype(int).tolist()
    share_N = np.concatenate(loss_weights("sequence_mean", [lengths], max_tokens=99))[np.array(seen.sequence_N)]
    settings = learner_settings(clip_low=0.01, clip_high=0.01)
    plain, token = (evaluate_objective(objective, logp_N, seen, settings, share_N) for objective in (gspo, gspo_token))
    learnt_N = np.array(seen.loss_mask_N) > 0
    assert plain.clipped_N.any()
    assert not plain.clipped_N.all()
    np.testing.assert_allclose(token.loss_N[learnt_N], plain.loss_N[learnt_N], rtol=1e-5)
    np.testing.assert_allclose(token.gradient_N, plain.gradient_N, rtol=1e-4, atol=1e-7)


def test_rloo_by_hand() -> None:
    """Completion 0: r = 2 * 8 / 4 = 4 (the old policy is half as likely); completion 1: r = 3.

    A = (0.5, -1). Losses -2, -2, 3. Gradient of their sum: dr/dlogp_t = r, twice -2 for each token of completion 0; 3
    for the other.
    """
    result = evaluate_objective(rloo, at_ratio([1.0, 4.0, 3.0]), tokens([0.5, 0.5, -1.0], sequence_N=[0, 0, 1]), WIDE)
    np.testing.assert_allclose(result.loss_N, [-2.0, -2.0, 3.0], rtol=1e-5)
    np.testing.assert_allclose(result.gradient_N, [-4.0, -4.0, 3.0], rtol=1e-5)


def test_rloo_on_policy_is_reinforce_for_sequences() -> None:
    """r = 1 and sequence_mean over S = 2: the gradient is -A_i / S for every token, for any length."""
    seen = tokens([2.0, 2.0, 2.0, -1.0], sequence_N=[0, 0, 0, 1])
    result = evaluate_objective(rloo, at_ratio([1.0] * 4), seen, WIDE, [1 / 6, 1 / 6, 1 / 6, 1 / 2])
    np.testing.assert_allclose(result.gradient_N, [-1.0, -1.0, -1.0, 0.5], rtol=1e-6)


@pytest.mark.parametrize("objective", [gspo, gspo_token, rloo])
def test_untrained_tokens_are_not_in_the_ratio(objective: Objective) -> None:
    """A token with loss mask 0 changes no other loss or gradient, and its own gradient is 0."""
    settings = learner_settings(clip_low=0.2, clip_high=0.2)
    alone = evaluate_objective(objective, at_ratio([1.1, 0.9]), tokens([1.0, 1.0]), settings)
    beside = evaluate_objective(
        objective, at_ratio([1.1, 0.9, 7.0]), tokens([1.0, 1.0, 1.0], loss_mask_N=[1, 1, 0]), settings
    )
    np.testing.assert_allclose(beside.loss_N[:2], alone.loss_N, rtol=1e-6)
    np.testing.assert_allclose(beside.gradient_N, [*alone.gradient_N, 0.0], rtol=1e-6)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "rloo"])
def test_a_ratio_of_completions_to_the_sampler_needs_float32(name: str) -> None:
    """An interpolated reference contains the sampler too. The message is one line with both remedies."""
    default, sampler, interpolated = (
        learner_settings(objective=name, **keys).objective
        for keys in ({}, {"ratio_reference": "sampler"}, {"ratio_reference": "batch_start_interpolated"})
    )
    for chosen in (sampler, interpolated):
        require_exact_ratio(chosen, "float32")
        for dtype in ("float16", "bfloat16"):
            require_exact_ratio(default, dtype)
            with pytest.raises(ProfileError, match=r'ratio_reference = "batch_start" or model.dtype = "float32"'):
                require_exact_ratio(chosen, dtype)
