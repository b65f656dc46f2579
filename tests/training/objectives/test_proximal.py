"""The interpolated proximal policy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from clotho.training.objectives.importance_correction import interpolated_proximal
from tests.training.objectives.random_inputs import row

BEHAVIOUR = row([-1.0, -1.0, -1.0])
CURRENT = row([-3.0, -3.0, -3.0])


def proximal(versions: list[int], *, start: float, now: float) -> list[float]:
    """Interpolated log-probabilities of three tokens sampled by these versions."""
    made: list[float] = np.array(
        interpolated_proximal(CURRENT, BEHAVIOUR, mx.array(versions), version_proximal=start, version_current=now)
    ).tolist()
    return made


def test_interpolation_by_hand() -> None:
    """From -1 to -3. Start 6, now 6.5: sampled by 6, alpha 0: -1; by 5, 1 / 1.5: -1 - 4/3; by 4, 2 / 2.5: -2.6."""
    np.testing.assert_allclose(proximal([6, 5, 4], start=6, now=6.5), [-1.0, -1 - 4 / 3, -2.6], rtol=1e-6)


def test_at_the_first_step_of_an_update_the_result_is_exact() -> None:
    """Now is the start: alpha 1, the current policy, for tokens of every age; also where the versions coincide."""
    assert proximal([6, 5, 0], start=6, now=6) == [-3.0, -3.0, -3.0]


def test_late_versions_keep_their_fractions() -> None:
    """At version 2^24 - 8, sampled 1, 2 and 4 versions before, half a step on: alpha 1/1.5, 2/2.5, 4/4.5."""
    v = 2**24 - 8
    expected = [-1 - 2 * a for a in (1 / 1.5, 2 / 2.5, 4 / 4.5)]
    np.testing.assert_allclose(proximal([v - 1, v - 2, v - 4], start=v, now=v + 0.5), expected, rtol=1e-6)


def test_no_gradient_flows_through_the_proximal_policy() -> None:
    """Not even where it is the current policy itself."""
    gradient_N = mx.grad(
        lambda logp_N: mx.sum(interpolated_proximal(logp_N, BEHAVIOUR, mx.array([6, 5, 4]), 6.0, 6.5))
    )(CURRENT)
    assert np.array(gradient_N).tolist() == [0.0, 0.0, 0.0]
