"""Corrections of the mismatch of sampler and learner, by token and by completion."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.config.objectives import RejectGeometricCorrection, RejectSequenceCorrection
from clotho.training.objectives.importance_correction import (
    CORRECTIONS,
    correction_weights,
    off_policy_mask,
    without_outliers,
)
from tests.learner_settings import learner_settings
from tests.training.objectives.random_inputs import random_tokens, row, tokens

NAMED = {str(struct.__struct_config__.tag): struct for struct in CORRECTIONS}
"""The structs of the corrections, by type."""

RATIOS = [3.0, 0.5, 1.1, 0.2, 9.0]
"""proximal / sampler: three tokens of completion 0, two of completion 1; the last is not learned."""
SEEN = tokens([1.0] * 5, loss_mask_N=[1, 1, 1, 1, 0], sequence_N=[0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "low", "high", "weights"),
    [
        ("truncate", 0.3, 2.0, [2, 0.5, 1.1, 0.3]),
        ("mask", 0.5, 2.0, [0, 0.5, 1.1, 0]),
        ("mask", 0.0, 2.0, [0, 0.5, 1.1, 0.2]),
        ("truncate_sequence", 0.0, 1.5, [1.5, 1.5, 1.5, 0.2]),
        ("truncate_sequence", 0.3, 2.0, [1.65, 1.65, 1.65, 0.3]),
        ("reject_sequence", 0.0, 1.5, [0, 0, 0, 1]),
        ("reject_sequence", 0.3, 2.0, [1, 1, 1, 0]),
        ("reject_geometric", 0.0, 1.1, [0, 0, 0, 1]),
        ("reject_geometric", 0.3, 1.2, [1, 1, 1, 0]),
    ],
)
def test_corrections_by_hand(name: str, low: float, high: float, weights: list[float]) -> None:
    """Completion 0: product 3 * 0.5 * 1.1 = 1.65, geometric mean 1.65^(1/3) = 1.182. Completion 1: 0.2 for both.

    The 9 is not learned, hence in no product. truncate: clip to [low, high]. mask: 0 outside. By completion: all tokens
    get the truncated product, or 1 or 0.
    """
    weight_N = np.array(CORRECTIONS[NAMED[name]](row(np.log(RATIOS)), SEEN, low, high))
    np.testing.assert_allclose(weight_N[:4], weights, rtol=1e-5)


@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.99, 1.01), (0.0, 1.5)])
@pytest.mark.parametrize("name", list(NAMED))
def test_where_sampler_and_learner_agree_every_weight_is_one(name: str, low: float, high: float) -> None:
    """Every correction with bounds on both sides of 1 does nothing there."""
    assert np.array(CORRECTIONS[NAMED[name]](mx.zeros(5), SEEN, low, high)).tolist() == [1.0] * 5


@pytest.mark.parametrize("name", list(NAMED))
def test_weights_are_finite_and_bounded_whatever_the_mismatch(name: str) -> None:
    """Log-ratios of plus and minus 500 nats; nothing above the upper bound."""
    weight_N = np.array(CORRECTIONS[NAMED[name]](row([500.0, 1.0, 1.0, -500.0, 0.0]), SEEN, 0.0, 2.0))
    assert ((weight_N >= 0) & (weight_N <= 2.0)).all()


@pytest.mark.parametrize(
    ("low", "high", "weights"), [(0.0, 0.0, [1, 1]), (0.4, 0.0, [1, 0]), (0.0, 2.0, [0, 1]), (0.1, 4.0, [1, 1])]
)
def test_one_outlier_drops_its_completion(low: float, high: float, weights: list[float]) -> None:
    """Ratios 3, 0.5, 1.1 and 0.2: below 0.4 only completion 1 has a token, above 2 only completion 0. 0 = no bound."""
    weight_N = np.array(without_outliers(row(np.log(RATIOS)), SEEN, low, high))
    assert weight_N.tolist() == [weights[0]] * 3 + [weights[1]] * 2


def test_the_off_policy_mask_drops_bad_completions_that_the_policy_has_left() -> None:
    """delta = 0.5. log mu - log pi: 1 and 0.2, mean 0.6, A < 0: dropped. The same with A > 0: kept.

    1 and -0.2, mean 0.4, A < 0: kept. The last token of the first, not learned, is not in the mean.
    """
    seen = tokens(
        [-1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0],
        rollout_logp_N=[-1.0] * 7,
        loss_mask_N=[1, 1, 0, 1, 1, 1, 1],
        sequence_N=[0, 0, 0, 1, 1, 2, 2],
    )
    learner_N = row([-2.0, -1.2, 9.0, -2.0, -1.2, -2.0, -0.8])
    assert np.array(off_policy_mask(learner_N, seen, 0.5)).tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_a_correction_and_the_masks_that_are_on_multiply() -> None:
    """truncate gives 2, 0.5, 1.1 and 0.2; the learner, at ratio 5 on token 3, makes completion 1 an outlier above 4."""
    rollout_logp_N = np.full(5, -2.0)
    seen = SEEN._replace(rollout_logp_N=row(rollout_logp_N))
    settings = learner_settings(
        ratio_reference="batch_start", correction="truncate", correction_high=2.0, outlier_high=4.0
    )
    learner_N = row(rollout_logp_N + np.log([3.0, 0.5, 1.1, 5.0, 1.0]))
    weight_N = np.array(correction_weights(learner_N, row(rollout_logp_N + np.log(RATIOS)), seen, settings.objective))
    np.testing.assert_allclose(weight_N, [2.0, 0.5, 1.1, 0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [*({"correction": name} for name in NAMED), {"outlier_high": 1.2}, {"off_policy_mask": 0.01}],
    ids=str,
)
def test_weights_carry_no_gradient(keys: dict[str, Any]) -> None:
    """Neither through the learner nor through the proximal policy, should that be the learner itself."""
    logp_N, seen = random_tokens(20)
    settings = learner_settings(ratio_reference="batch_start", **keys)
    gradient_N = mx.grad(lambda logp_N: mx.sum(correction_weights(logp_N, logp_N, seen, settings.objective)))(logp_N)
    assert np.array(gradient_N).tolist() == [0.0] * 20


def test_the_geometric_mean_does_not_grow_with_length() -> None:
    """Tokens of ratio 1.01 each: over 100 of them the product is 2.7 and rejected above 2, the mean stays 1.01."""
    seen = tokens([1.0] * 100)
    log_ratio_N = row([math.log(1.01)] * 100)
    assert np.array(CORRECTIONS[RejectSequenceCorrection](log_ratio_N, seen, 0.0, 2.0)).max() == 0.0
    assert np.array(CORRECTIONS[RejectGeometricCorrection](log_ratio_N, seen, 0.0, 1.02)).min() == 1.0
