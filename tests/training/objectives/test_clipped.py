"""The clipped surrogate, dual clip, and the objectives that share them."""

from __future__ import annotations

import numpy as np
import pytest

from clotho.training.objectives.contract import Objective
from clotho.training.objectives.token_level import (
    bnpo,
    clipped_surrogate,
    dapo,
    dr_grpo,
    grpo,
    ppo_decoupled,
    reinforce_plus_plus,
)
from tests.learner_settings import learner_settings
from tests.training.objectives.random_inputs import at_ratio, random_tokens, row, teach, tokens

SETTINGS = learner_settings(clip_low=0.2, clip_high=0.28)
SHARED = [grpo, dr_grpo, bnpo, dapo, reinforce_plus_plus, ppo_decoupled]


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
    taught = teach(clipped_surrogate, at_ratio([ratio]), tokens([A]), SETTINGS)
    assert taught.loss_N[0] == pytest.approx(loss, rel=1e-6)
    assert taught.gradient_N[0] == pytest.approx(gradient, rel=1e-6)
    assert taught.clipped_N[0] == clipped


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likelier() -> None:
    """c = 3, A = -2: at r = 5 the loss 10 becomes c |A| = 6, flat; at r = 2 it stays 4, slope 4.

    A = +2 is never touched: at r = 1/10 the loss is -0.2, slope -0.2.
    """
    taught = teach(
        clipped_surrogate,
        at_ratio([5.0, 2.0, 0.1]),
        tokens([-2.0, -2.0, 2.0]),
        learner_settings(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    )
    np.testing.assert_allclose(taught.loss_N, [6.0, 4.0, -0.2], rtol=1e-6)
    np.testing.assert_allclose(taught.gradient_N, [0.0, 4.0, -0.2], rtol=1e-6)
    assert taught.clipped_N.tolist() == [True, False, False]


def test_dual_clip_out_of_reach_is_no_dual_clip() -> None:
    """Ratios stay below 1000, so c = 1000 changes nothing."""
    logp_N, seen = random_tokens(40)
    plain = teach(clipped_surrogate, logp_N, seen, SETTINGS)
    far = teach(clipped_surrogate, logp_N, seen, learner_settings(clip_low=0.2, clip_high=0.28, dual_clip=1000.0))
    assert plain.clipped_N.any()
    for one, other in zip(plain, far, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("objective", SHARED)
def test_the_objectives_that_share_the_formula_agree_token_by_token(objective: Objective) -> None:
    """They differ in their recipes alone."""
    logp_N, seen = random_tokens(40)
    for one, other in zip(
        teach(objective, logp_N, seen, SETTINGS), teach(clipped_surrogate, logp_N, seen, SETTINGS), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_a_token_that_the_policy_finds_impossible_stays_finite() -> None:
    """A log-ratio of 500 nats is clamped to 20: the loss is e^20 at most, and the gradient there is 0."""
    seen = tokens([-1.0, 1.0], old_logp_N=[-500.0, 0.0])
    taught = teach(clipped_surrogate, row([0.0, -500.0]), seen, SETTINGS)
    np.testing.assert_allclose(taught.loss_N, [np.exp(20.0), -np.exp(-20.0)], rtol=1e-5)
    assert taught.gradient_N.tolist() == [0.0, 0.0]
