"""The posterior over the success rate of every problem, with a prior from its type."""

from __future__ import annotations

import numpy as np
import pytest

from clotho.data.success_rates import (
    PRIOR_CORRELATION,
    PRIOR_CORRELATION_GROUPS,
    PRIOR_GROUPS,
    Posterior,
    SuccessRates,
)


def rates_of(*types: str, half_life: float = 1e9, group_size: int = 8) -> SuccessRates:
    """Success rates of problems of these types; by default, nothing is forgotten."""
    return SuccessRates(types, group_size=group_size, half_life=half_life)


def strength(correlation: float, groups: float, group_size: int = 8) -> float:
    """The strength of a prior by the equation of `SuccessRates`."""
    return 1 / (correlation + (correlation + (1 - correlation) / group_size) / (groups + PRIOR_GROUPS)) - 1


def test_the_prior_of_a_new_type_has_the_mean_one_half_and_is_broad() -> None:
    """Its strength is below that of the uniform distribution: the mean of the type is unknown too."""
    posterior = rates_of("a", "a").posterior()
    c = strength(PRIOR_CORRELATION, 0.0)
    assert posterior.alpha_N == pytest.approx([c / 2, c / 2])
    assert posterior.beta_N == pytest.approx([c / 2, c / 2])
    assert c < 2


def test_the_posterior_is_the_prior_of_the_type_plus_the_completions_of_the_problem() -> None:
    """By hand, after one group with 6 successes of 8: x = 0.75, y = 30 / 56, weight 1."""
    rates = rates_of("a", "a", "b")
    rates.add(0, successes=6, completions=8)
    m = (0.75 + PRIOR_GROUPS / 2) / (1 + PRIOR_GROUPS)
    between = (30 / 56 - 0.75**2) / (m * (1 - m))
    rho = (PRIOR_CORRELATION * PRIOR_CORRELATION_GROUPS + between) / (PRIOR_CORRELATION_GROUPS + 1)
    c = strength(rho, 1.0)
    posterior = rates.posterior()
    assert posterior.alpha_N[:2] == pytest.approx([c * m + 6, c * m])
    assert posterior.beta_N[:2] == pytest.approx([c * (1 - m) + 2, c * (1 - m)])
    assert posterior.mean_N[2] == 0.5, "another type is not affected"


@pytest.mark.parametrize(("alpha", "beta"), [(0.4, 0.4), (1.0, 1.0), (9.5, 2.5)])
def test_expectations_are_integrals_over_the_posterior(alpha: float, beta: float) -> None:
    """E[p^2 (1 - p)] and E[p^3 + (1 - p)^3], by numerical integration with p = sin(u)^2."""
    u = (np.arange(200_000) + 0.5) / 200_000 * np.pi / 2
    p = np.sin(u) ** 2
    density = np.sin(u) ** (2 * alpha - 1) * np.cos(u) ** (2 * beta - 1)
    posterior = Posterior(np.array([alpha]), np.array([beta]))
    for found, values in (
        (posterior.expectation(2, 1), p**2 * (1 - p)),
        (posterior.zero_variance(3), p**3 + (1 - p) ** 3),
    ):
        assert found[0] == pytest.approx((values * density).sum() / density.sum(), rel=1e-4)


def test_the_strength_of_a_prior_follows_the_differences_between_problems() -> None:
    """Equal success rates make it strong, problems that are always or never solved make it weak."""
    rates = rates_of(*["equal"] * 41, *["different"] * 41)
    for problem in range(40):
        rates.add(problem, successes=4, completions=8)
        rates.add(41 + problem, successes=8 * (problem % 2), completions=8)
    posterior = rates.posterior()
    equal, different = (posterior.alpha_N[i] + posterior.beta_N[i] for i in (40, 81))
    assert posterior.mean_N[[40, 81]] == pytest.approx([0.5, 0.5])
    assert equal > 10 > 1 > different
    assert posterior.zero_variance(8)[40] < 0.1 < 0.5 < posterior.zero_variance(8)[81]


def test_groups_of_one_problem_say_little_about_the_others() -> None:
    """A problem that is solved again and again does not make its type look solved."""
    again, once = rates_of(*["a"] * 41), rates_of(*["a"] * 41)
    for problem in range(40):
        again.add(0, successes=8, completions=8)
        once.add(problem, successes=8, completions=8)
    assert again.posterior().mean_N[40] < 0.9 < once.posterior().mean_N[40]


def test_evidence_counts_half_after_the_half_life() -> None:
    """It is dropped when almost nothing is left, so that a checkpoint stays small."""
    rates = rates_of("a", "a", half_life=10.0)
    rates.add(0, successes=6, completions=8)
    for _ in range(10):
        rates.forget()
    problems, successes, failures = rates.counts()
    assert problems.tolist() == [0]
    assert [*successes.tolist(), *failures.tolist()] == pytest.approx([3.0, 1.0])
    assert rates.types()["a"].groups == pytest.approx(0.5)
    for _ in range(100):
        rates.forget()
    assert rates.counts()[0].tolist() == []


def test_restored_rates_are_equal_bit_for_bit() -> None:
    """Also if the process had other evidence before."""
    rates, other = rates_of("a", "b", "a", half_life=3.0), rates_of("a", "b", "a", half_life=3.0)
    for step in range(5):
        rates.forget()
        rates.add(step % 2, successes=step, completions=8)
    other.add(2, successes=1, completions=8)
    other.restore(*rates.counts(), rates.types())
    for one, two in zip(rates.posterior(), other.posterior(), strict=True):
        assert one.tobytes() == two.tobytes()
