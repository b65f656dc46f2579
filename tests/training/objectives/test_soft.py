"""The soft gate of SAPO."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clotho.training.objectives.token_level import sapo
from tests.learner_settings import learner_settings
from tests.training.objectives.random_inputs import at_ratio, teach, tokens

SETTINGS = learner_settings(objective="sapo", sapo_tau_pos=1.0, sapo_tau_neg=2.0)


def test_sapo_by_hand() -> None:
    """A = 3, r = 1 + ln 3, tau 1: sigmoid(ln 3) = 3/4, L = -4 * 3/4 * 3 = -9; gradient -A r 4 p (1 - p) = -9/4 r.

    A = -3, r = 1 + ln(3) / 2, tau 2: sigmoid(ln 3) = 3/4, L = 4/2 * 3/4 * 3 = 4.5; gradient 9/4 r.
    """
    ratio_N = [1 + math.log(3), 1 + math.log(3) / 2]
    taught = teach(sapo, at_ratio(ratio_N), tokens([3.0, -3.0]), SETTINGS)
    np.testing.assert_allclose(taught.loss_N, [-9.0, 4.5], rtol=1e-5)
    np.testing.assert_allclose(taught.gradient_N, [-2.25 * ratio_N[0], 2.25 * ratio_N[1]], rtol=1e-5)


@pytest.mark.parametrize("A", [2.0, -2.0])
def test_at_ratio_one_sapo_is_the_policy_gradient(A: float) -> None:
    """Whatever the temperature, the gradient is -A; the value is -2 A / tau."""
    taught = teach(sapo, at_ratio([1.0]), tokens([A]), SETTINGS)
    assert taught.gradient_N[0] == pytest.approx(-A, rel=1e-6)
    assert taught.loss_N[0] == pytest.approx(-2 * A / (1.0 if A > 0 else 2.0), rel=1e-6)


def test_the_gate_fades_on_both_sides_and_faster_for_negative_advantages() -> None:
    """At r = 4 the gradient per r is 4 p (1 - p) |A|: with tau 1, 0.181; with tau 2, 0.00987."""
    taught = teach(sapo, at_ratio([4.0, 4.0]), tokens([1.0, -1.0]), SETTINGS)
    np.testing.assert_allclose(np.abs(taught.gradient_N) / 4, [0.180707, 0.009866], rtol=1e-4)
