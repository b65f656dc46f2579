"""The loss of a micro-batch: ratios, corrections, penalties and metric sums."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.training.objectives.contract import ObjectiveInputs
from clotho.training.objectives.functions import objective
from clotho.training.objectives.loss import (
    LossCoefficients,
    MetricSums,
    TokenLossInputs,
    initial_loss_coefficients,
    policy_loss,
)
from protocols.step import Cut
from tests.learner_settings import learner_settings
from tests.training.objectives.objective_inputs import float_array

ENTROPY_N = float_array([0.5, 0.25, 0.25])
BEHAVIOUR_N = float_array([-2.0, -2.0, -2.0])


def inputs(
    advantage_N: list[float],
    *,
    proximal_N: mx.array | None = None,
    loss_weight_N: mx.array | None = None,
    on_policy_mask_N: mx.array | None = None,
    **fields: Any,
) -> TokenLossInputs:
    """Return trained tokens of one completion, with the sampler at -2, all on-policy, and loss weight 1 by default."""
    N = len(advantage_N)
    tokens = ObjectiveInputs(
        old_logp_N=float_array([-2.0] * N),
        rollout_logp_N=float_array([-2.0] * N),
        advantage_N=float_array(advantage_N),
        loss_mask_N=mx.ones(N),
        sequence_N=mx.zeros(N, dtype=mx.int32),
        sequences=1,
        group_B=mx.zeros(1, dtype=mx.int32),
    )
    return TokenLossInputs(
        tokens=tokens._replace(**fields),
        proximal_N=proximal_N,
        loss_weight_N=mx.ones(N) if loss_weight_N is None else loss_weight_N,
        on_policy_mask_N=mx.ones(N) if on_policy_mask_N is None else on_policy_mask_N,
    )


def differentiate(
    logp_N: mx.array, seen: TokenLossInputs, entropy_N: mx.array | None = None, **keys: Any
) -> tuple[float, np.ndarray, np.ndarray, MetricSums]:
    """Return the loss, its gradients with respect to log-probability and entropy, and the sums."""
    settings = learner_settings(**keys)
    loss_coefficients = initial_loss_coefficients(settings)
    entropy_N = mx.zeros_like(logp_N) if entropy_N is None else entropy_N

    def loss(logp_N: mx.array, entropy_N: mx.array) -> Any:
        return policy_loss(
            logp_N,
            entropy_N,
            seen,
            settings=settings,
            loss_coefficients=loss_coefficients,
            objective=objective(settings.objective),
        )

    (value, sums, _), (by_logp_N, by_entropy_N) = mx.value_and_grad(loss, argnums=(0, 1))(logp_N, entropy_N)
    return value.item(), np.array(by_logp_N), np.array(by_entropy_N), sums


def logp_at_ratio(values: list[float]) -> mx.array:
    """Return log-probabilities with these ratios to the sampler."""
    return float_array(-2.0 + np.log(values))


def test_clipped_tokens_are_counted_by_the_sign_of_their_advantage() -> None:
    """Ratios 2 and 2 with A = 1 and -1 and 1/2 with A = -1, range [0.8, 1.2]: one of three at each end."""
    _, _, _, sums = differentiate(logp_at_ratio([2.0, 2.0, 0.5]), inputs([1.0, -1.0, -1.0]))
    assert {name: sums[f"clip_fraction{name}"].tolist() for name in ("", "_low", "_high")} == {
        "": [2.0, 3.0],
        "_low": [1.0, 3.0],
        "_high": [1.0, 3.0],
    }


def test_rejected_tokens_have_no_policy_gradient_and_are_counted() -> None:
    """IcePop within [0.5, 2]: w = 3 becomes 0.

    Penalty, bonus and denominator do not change. Loss weights 1/2. Loss: the second token's -1/2, k1 penalties 0.1 (ln
    3 + 0) / 2, bonus -0.2 * 1.5 / 2.
    """
    value, gradient_N, entropy_gradient_N, sums = differentiate(
        logp_at_ratio([3.0, 1.0]),
        inputs([1.0, 1.0], loss_weight_N=float_array([0.5, 0.5]), reference_logp_N=float_array([-2.0, -2.0])),
        float_array([1.0, 0.5]),
        ratio_reference="batch_start",
        correction="mask",
        correction_low=0.5,
        correction_high=2.0,
        kl_beta=0.1,
        kl_estimator="k1",
        entropy_weight=0.2,
    )
    assert value == pytest.approx(-0.5 + 0.05 * math.log(3) - 0.15, rel=1e-5)
    np.testing.assert_allclose(gradient_N, [0.05, -0.45], rtol=1e-5)
    np.testing.assert_allclose(entropy_gradient_N, [-0.1, -0.1], rtol=1e-6)
    assert sums["rejected_fraction"][0].item() == 1.0


@pytest.mark.parametrize("ratio_reference", ["sampler", "batch_start"])
def test_completion_masks_apply_to_every_ratio_reference(ratio_reference: str) -> None:
    """One token of ratio 9, above 4, masks its completion. The other completion has gradient -1."""
    seen = inputs([1.0] * 3, sequence_N=mx.array([0, 0, 1]), sequences=2)
    _, gradient_N, _, sums = differentiate(
        logp_at_ratio([9.0, 1.0, 1.0]), seen, ratio_reference=ratio_reference, outlier_high=4.0
    )
    np.testing.assert_allclose(gradient_N, [0.0, 0.0, -1.0], rtol=1e-6)
    assert sums["rejected_fraction"][0].item() == 2.0


def test_a_kl_penalty_is_in_the_loss_or_in_the_reward() -> None:
    """k3 with d = ln 2: 1 - ln 2, gradient 1 - e^d = -1, times beta 0.1.

    In the reward: measured, but not in the loss. Unbiased with ratio 1: the same value, gradient (1 - ln 2) - 1 = -ln
    2.
    """
    logp_N, seen = logp_at_ratio([1.0]), inputs([0.0], reference_logp_N=logp_at_ratio([2.0]))
    value, gradient_N, _, sums = differentiate(logp_N, seen, kl_beta=0.1)
    assert value == pytest.approx(0.1 * (1 - math.log(2)), rel=1e-5)
    assert gradient_N[0] == pytest.approx(-0.1, rel=1e-5)
    assert sums["kl"][0].item() == pytest.approx(1 - math.log(2), rel=1e-5)
    value, gradient_N, _, sums = differentiate(logp_N, seen, kl_beta=0.1, kl_in="reward")
    assert (value, gradient_N[0]) == (0.0, 0.0)
    assert sums["kl"][0].item() == pytest.approx(1 - math.log(2), rel=1e-5)
    value, gradient_N, _, _ = differentiate(logp_N, seen, kl_beta=0.1, kl_unbiased=True)
    assert value == pytest.approx(0.1 * (1 - math.log(2)), rel=1e-5)
    assert gradient_N[0] == pytest.approx(-0.1 * math.log(2), rel=1e-5)


def test_controlled_coefficients_replace_those_of_the_profile() -> None:
    """kl_beta 0.1 in the profile, 0.3 after control: gradient of k1 is 0.3.

    Entropy coefficient 0.2 after control: -0.2.
    """
    seen = inputs([0.0], reference_logp_N=float_array([-1.0]))
    settings = learner_settings(kl_beta=0.1, kl_estimator="k1")

    def loss(logp_N: mx.array, entropy_N: mx.array) -> Any:
        loss_coefficients = LossCoefficients(0.3, 0.2)
        return policy_loss(
            logp_N,
            entropy_N,
            seen,
            settings=settings,
            loss_coefficients=loss_coefficients,
            objective=objective(settings.objective),
        )[0]

    by_logp_N, by_entropy_N = mx.grad(loss, argnums=(0, 1))(float_array([-2.0]), float_array([1.0]))
    assert by_logp_N.item() == pytest.approx(0.3)
    assert by_entropy_N.item() == pytest.approx(-0.2)


def test_sums_are_over_trained_tokens() -> None:
    """Ratios 1, 2, 1/2, and a fourth that is not trained on.

    Loss weights 1/4, sums without weights. ratio 3.5, squares 1 + 4 + 1/4; mismatch of the two on-policy tokens: k3
    with d = ln r: 0 and 2 - 1 - ln 2.
    """
    seen = inputs(
        [1.0] * 4,
        loss_mask_N=float_array([1, 1, 1, 0]),
        on_policy_mask_N=float_array([1, 1, 0, 1]),
        loss_weight_N=float_array([0.25] * 4),
        reference_logp_N=float_array([-1.0] * 4),
    )
    value, _, _, sums = differentiate(
        logp_at_ratio([1.0, 2.0, 0.5, 7.0]), seen, float_array([0.5, 0.25, 0.25, 9.0]), kl_beta=0.1, kl_in="reward"
    )
    expected = {
        "kl": [sum(math.exp(d) - 1 - d for d in (1.0, 1.0 - math.log(2), 1.0 + math.log(2))), 3],
        "entropy": [1.0, 3],
        "clip_fraction": [1.0, 3],
        "clip_fraction_low": [0.0, 3],
        "clip_fraction_high": [1.0, 3],
        "ratio_mean": [3.5, 3],
        "ratio_squared_mean": [5.25, 3],
        "rejected_fraction": [0.0, 3],
        "mismatch_kl": [1.0 - math.log(2), 2],
        "unmoved_cut_fraction": [1.0, 2],
    }
    assert value == pytest.approx(-2.78 / 4, rel=1e-5)
    assert sums.keys() == expected.keys()
    for name, measured in sums.items():
        assert measured.tolist() == pytest.approx(expected[name], rel=1e-5), name


def test_a_correction_does_not_apply_to_a_ratio_to_the_sampler() -> None:
    """It would count the same mismatch twice."""
    with pytest.raises(ValueError, match="twice"):
        differentiate(logp_at_ratio([1.0]), inputs([1.0]), correction="truncate")


@pytest.mark.parametrize(("correction", "clipped_and_limited"), [("truncate", Cut.CLIP), ("mask", Cut.CORRECTION)])
def test_the_factor_of_zero_decides_what_cuts_a_token(correction: str, clipped_and_limited: Cut) -> None:
    """A mask, then a rejection, then a clip, then a truncation. Ratios are learner / proximal, proximal / sampler."""
    ratios = [(1.0, 1.0), (1.5, 1.0), (1.0, 3.0), (1.5, 3.0), (1.5, 3.0)]
    moved_N, mismatch_N = np.log(np.array(ratios)).T
    seen = inputs([1.0] * 5, proximal_N=float_array(mismatch_N - 2.0), loss_mask_N=float_array([1, 1, 1, 1, 0]))
    settings = learner_settings(ratio_reference="batch_start", correction=correction, correction_high=2.0)
    _, _, cut_N = policy_loss(
        float_array(mismatch_N + moved_N - 2.0),
        mx.zeros(5),
        seen,
        settings=settings,
        loss_coefficients=initial_loss_coefficients(settings),
        objective=objective(settings.objective),
    )
    assert cut_N.dtype == mx.uint8
    expected = [Cut.NONE, Cut.CLIP, Cut.CORRECTION, clipped_and_limited, Cut.MASK]
    assert np.array(cut_N).tolist() == expected
