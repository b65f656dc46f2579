"""Objectives that weigh log pi."""

from __future__ import annotations

import numpy as np

from clotho.config.schema import LearnerSection
from clotho.training.objectives.importance_correction import truncate
from clotho.training.objectives.token_level import cispo, reinforce
from tests.learner_settings import learner_settings
from tests.training.objectives.random_inputs import ANCHOR, at_ratio, random_tokens, row, teach, tokens


def test_reinforce_by_hand() -> None:
    """log pi = -1 and -3, A = 2 and -0.5: losses 2 and -1.5, gradients -A, and the anchor plays no part."""
    taught = teach(reinforce, row([-1.0, -3.0]), tokens([2.0, -0.5], old_logp_N=[-9.0, -0.1]), LearnerSection())
    np.testing.assert_allclose(taught.loss_N, [2.0, -1.5])
    np.testing.assert_allclose(taught.gradient_N, [-2.0, 0.5])
    assert not taught.clipped_N.any()


def test_cispo_by_hand() -> None:
    """Range [0.5, 2]: ratios 3, 1/4, 1.5 weigh 2, 1/2, 1.5; L = -w A log pi, and the gradient is -w A, never 0.

    The first with A = 1: loss -2 (ANCHOR + ln 3), gradient -2. The clipped are counted.
    """
    taught = teach(
        cispo,
        at_ratio([3.0, 0.25, 1.5]),
        tokens([1.0, -1.0, 2.0]),
        learner_settings(objective="cispo", clip_low=0.5, clip_high=1.0),
    )
    logp_N = ANCHOR + np.log([3.0, 0.25, 1.5])
    np.testing.assert_allclose(taught.loss_N, [-2 * logp_N[0], 0.5 * logp_N[1], -3 * logp_N[2]], rtol=1e-5)
    np.testing.assert_allclose(taught.gradient_N, [-2.0, 0.5, -3.0], rtol=1e-5)
    assert taught.clipped_N.tolist() == [True, True, False]


def test_cispo_without_a_lower_bound_is_reinforce_with_truncated_importance() -> None:
    """clip_low = 1: the weight is min(r, 1 + clip_high), which is what TIS gives against the same anchor."""
    logp_N, seen = random_tokens(40)
    taught = teach(cispo, logp_N, seen, learner_settings(objective="cispo", clip_low=1.0, clip_high=0.2))
    weight_N = np.array(truncate(logp_N - seen.old_logp_N, seen, 0.0, 1.2))
    plain = teach(reinforce, logp_N, seen, LearnerSection())
    assert (weight_N == np.float32(1.2)).any()
    np.testing.assert_allclose(taught.gradient_N, weight_N * plain.gradient_N, rtol=1e-5)
    np.testing.assert_allclose(taught.loss_N, weight_N * plain.loss_N, rtol=1e-5)
