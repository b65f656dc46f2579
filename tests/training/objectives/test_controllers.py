"""Controllers of the KL coefficient and the entropy coefficient."""

from __future__ import annotations

import math

import pytest

from clotho.training.objectives.loss import LossCoefficients, initial_loss_coefficients, next_loss_coefficients
from tests.learner_settings import learner_settings


def kl_beta(kl: float) -> float:
    """Return the next coefficient after 0.5, with target 0.1 and horizon 10."""
    settings = learner_settings(kl_beta=0.5, kl_target=0.1, kl_horizon=10)
    return next_loss_coefficients(LossCoefficients(0.5, 0.0), kl=kl, entropy=1.0, settings=settings).kl_beta


@pytest.mark.parametrize(("kl", "beta"), [(0.1, 0.5), (0.11, 0.505), (0.09, 0.495), (7.0, 0.51), (0.0, 0.49)])
def test_the_kl_coefficient_by_hand(kl: float, beta: float) -> None:
    """beta (1 + e / 10), e = clip(KL / 0.1 - 1, -0.2, 0.2): at 0.11 e = 0.1, 0.5 * 1.01; at 7 e = 0.2, 0.5 * 1.02."""
    assert kl_beta(kl) == pytest.approx(beta, rel=1e-12)


@pytest.mark.parametrize(
    ("before", "entropy", "weight"), [(0.01, 0.2, 0.011), (0.01, 0.3, 0.009), (0.01, 0.4, 0.009), (0.0005, 2.0, 0.0)]
)
def test_the_entropy_coefficient_by_hand(before: float, entropy: float, weight: float) -> None:
    """Target 0.3, step 0.001: it increases below the target and decreases from the target on, and not below 0."""
    settings = learner_settings(entropy_weight=0.01, entropy_target=0.3, entropy_step=0.001)
    after = next_loss_coefficients(LossCoefficients(0.0, before), kl=0.0, entropy=entropy, settings=settings)
    assert after.entropy_coef == pytest.approx(weight, rel=1e-12, abs=0.0)


def test_the_entropy_coefficient_decays_with_every_update() -> None:
    """0.01, 0.005, 0.0025 with a factor of 0.5, for any entropy."""
    settings = learner_settings(entropy_weight=0.01, entropy_decay=0.5)
    loss_coefficients = initial_loss_coefficients(settings)
    assert loss_coefficients == (0.0, 0.01)
    for expected in (0.005, 0.0025):
        loss_coefficients = next_loss_coefficients(loss_coefficients, kl=0.0, entropy=math.nan, settings=settings)
        assert loss_coefficients.entropy_coef == expected


@pytest.mark.parametrize("measured", [math.nan, math.inf])
def test_nan_measurements_change_no_coefficient(measured: float) -> None:
    """A NaN would otherwise stay in every later update."""
    settings = learner_settings(kl_beta=0.1, kl_target=0.1, entropy_weight=1e-3, entropy_target=0.3)
    loss_coefficients = initial_loss_coefficients(settings)
    assert (
        next_loss_coefficients(loss_coefficients, kl=measured, entropy=measured, settings=settings) == loss_coefficients
    )
