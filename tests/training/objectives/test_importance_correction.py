"""Importance corrections by token and by completion, and the interpolated proximal policy."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.training.objectives.importance_correction import (
    CORRECTIONS,
    correction_weights,
    interpolated_proximal,
    off_policy_mask,
    without_outliers,
)
from tests.learner_settings import learner_settings
from tests.training.objectives.objective_inputs import float_array, random_tokens, tokens

NAMED = {str(struct.__struct_config__.tag): struct for struct in CORRECTIONS}
"""The structs of the corrections, by type."""

RATIOS = [3.0, 0.5, 1.1, 0.2, 9.0]
"""proximal / sampler: three tokens of completion 0, two of completion 1; the last is not trained on."""
SEEN = tokens([1.0] * 5, loss_mask_N=[1, 1, 1, 1, 0], sequence_N=[0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "low", "high", "weights"),
    [
        ("truncate", 0.3, 2.0, [2, 0.5, 1.1, 0.3]), ("mask", 0.5, 2.0, [0, 0.5, 1.1, 0]),
        ("mask", 0.0, 2.0, [0, 0.5, 1.1, 0.2]), ("truncate_sequence", 0.0, 1.5, [1.5, 1.5, 1.5, 0.2]),
        ("truncate_sequence", 0.3, 2.0, [1.65, 1.65, 1.65, 0.3]), ("reject_sequence", 0.0, 1.5, [0, 0, 0, 1]),
        ("reject_sequence", 0.3, 2.0, [1, 1, 1, 0]), ("reject_geometric", 0.0, 1.1, [0, 0, 0, 1]),
        ("reject_geometric", 0.3, 1.2, [1, 1, 1, 0]),
    ],
)  # fmt: skip
def test_corrections_by_hand(name: str, low: float, high: float, weights: list[float]) -> None:
    """Completion 0: product 3 * 0.5 * 1.1 = 1.65, geometric mean 1.65^(1/3) = 1.182. Completion 1: 0.2 for both.

    The 9 is not trained on and in no product. truncate: clip to [low, high]. mask: 0 outside. By completion: all tokens
    get the truncated product, or 1 or 0.
    """
    weight_N = np.array(CORRECTIONS[NAMED[name]](float_array(np.log(RATIOS)), SEEN, low, high)[0])
    np.testing.assert_allclose(weight_N[:4], weights, rtol=1e-5)


@pytest.mark.parametrize("name", list(NAMED))
def test_weights_are_finite_and_bounded(name: str) -> None:
    """Log-ratios of plus and minus 500 nats. No weight exceeds the upper bound."""
    weight_N = np.array(CORRECTIONS[NAMED[name]](float_array([500.0, 1.0, 1.0, -500.0, 0.0]), SEEN, 0.0, 2.0)[0])
    assert ((weight_N >= 0) & (weight_N <= 2.0)).all()


@pytest.mark.parametrize(
    ("low", "high", "weights"), [(0.0, 0.0, [1, 1]), (0.4, 0.0, [1, 0]), (0.0, 2.0, [0, 1]), (0.1, 4.0, [1, 1])]
)
def test_one_outlier_masks_its_completion(low: float, high: float, weights: list[float]) -> None:
    """Ratios 3, 0.5, 1.1 and 0.2: only completion 1 has a token below 0.4, and only completion 0 one above 2.

    0 = no bound.
    """
    weight_N = np.array(without_outliers(float_array(np.log(RATIOS)), SEEN, low, high))
    assert weight_N.tolist() == [weights[0]] * 3 + [weights[1]] * 2


def test_the_off_policy_mask_drops_completions_with_negative_advantage() -> None:
    """delta = 0.5.

    log mu - log pi: 1 and 0.2, mean 0.6, A < 0: dropped. The same with A > 0: kept. 1 and -0.2, mean 0.4, A < 0: kept.
    The last token of the first is not trained on and not in the mean.
    """
    seen = tokens(
        [-1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0],
        rollout_logp_N=[-1.0] * 7,
        loss_mask_N=[1, 1, 0, 1, 1, 1, 1],
        sequence_N=[0, 0, 0, 1, 1, 2, 2],
    )
    learner_N = float_array([-2.0, -1.2, 9.0, -2.0, -1.2, -2.0, -0.8])
    assert np.array(off_policy_mask(learner_N, seen, 0.5)).tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_a_correction_and_the_masks_multiply() -> None:
    """truncate gives 2, 0.5, 1.1 and 0.2. The learner's ratio of 5 on token 3 masks completion 1 above 4."""
    rollout_logp_N = np.full(5, -2.0)
    seen = SEEN._replace(rollout_logp_N=float_array(rollout_logp_N))
    settings = learner_settings(
        ratio_reference="batch_start", correction="truncate", correction_high=2.0, outlier_high=4.0
    )
    learner_N = float_array(rollout_logp_N + np.log([3.0, 0.5, 1.1, 5.0, 1.0]))
    proximal_N = float_array(rollout_logp_N + np.log(RATIOS))
    weight_N, limited_N, kept_N = map(np.array, correction_weights(learner_N, proximal_N, seen, settings.objective))
    np.testing.assert_allclose(weight_N, [2.0, 0.5, 1.1, 0.0, 0.0], rtol=1e-5)
    assert limited_N.tolist() == [True, False, False, False, True]
    assert kept_N.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "keys", [*({"correction": name} for name in NAMED), {"outlier_high": 1.2}, {"off_policy_mask": 0.01}], ids=str
)
def test_weights_have_no_gradient(keys: dict[str, Any]) -> None:
    """Neither with respect to the learner nor to the proximal policy, even if both are equal."""
    logp_N, seen = random_tokens(20)
    settings = learner_settings(ratio_reference="batch_start", **keys)

    def total(logp_N: mx.array) -> mx.array:
        return mx.sum(correction_weights(logp_N, logp_N, seen, settings.objective).weight_N)

    gradient_N = mx.grad(total)(logp_N)
    assert np.array(gradient_N).tolist() == [0.0] * 20


BEHAVIOUR = float_array([-1.0, -1.0, -1.0])
CURRENT = float_array([-3.0, -3.0, -3.0])


def proximal(versions: list[int], *, start: float, now: float) -> list[float]:
    """Return interpolated log-probabilities of three tokens sampled by these versions."""
    made: list[float] = np.array(
        interpolated_proximal(CURRENT, BEHAVIOUR, mx.array(versions), version_proximal=start, version_current=now)
    ).tolist()
    return made


def test_interpolation_by_hand() -> None:
    """From -1 to -3. Start 6, now 6.5: sampled by 6, alpha 0: -1; by 5, 1 / 1.5: -1 - 4/3; by 4, 2 / 2.5: -2.6."""
    np.testing.assert_allclose(proximal([6, 5, 4], start=6, now=6.5), [-1.0, -1 - 4 / 3, -2.6], rtol=1e-6)


def test_at_the_start_of_an_update_the_result_is_exact() -> None:
    """alpha is 1 and the result the current policy, for tokens of every staleness, also if the versions are equal."""
    assert proximal([6, 5, 0], start=6, now=6) == [-3.0, -3.0, -3.0]


def test_large_versions_keep_their_fractions() -> None:
    """At version 2^24 - 8, sampled 1, 2 and 4 versions before, half a step on: alpha 1/1.5, 2/2.5, 4/4.5."""
    v = 2**24 - 8
    expected = [-1 - 2 * a for a in (1 / 1.5, 2 / 2.5, 4 / 4.5)]
    np.testing.assert_allclose(proximal([v - 1, v - 2, v - 4], start=v, now=v + 0.5), expected, rtol=1e-6)


def test_the_proximal_policy_has_no_gradient() -> None:
    """Not even if it is the current policy."""
    gradient_N = mx.grad(
        lambda logp_N: mx.sum(interpolated_proximal(logp_N, BEHAVIOUR, mx.array([6, 5, 4]), 6.0, 6.5))
    )(CURRENT)
    assert np.array(gradient_N).tolist() == [0.0, 0.0, 0.0]


def test_a_ratio_that_equals_a_bound_is_no_outlier() -> None:
    """The interval of the ratios is closed."""
    log_ratio_N = float_array([math.log(0.5), math.log(2.0), 0.0, 0.0, 0.0])
    assert np.array(without_outliers(log_ratio_N, SEEN, 0.5, 2.0)).tolist() == [1.0] * 5
