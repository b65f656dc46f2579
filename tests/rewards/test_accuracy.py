"""Accuracy with confidence intervals: Wilson, clustered shares, paired differences, and pass@k."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from clotho.rewards.accuracy import Estimate, accuracy, grade, mean_difference, mean_share, pass_at
from protocols.prompt import Problem


def bootstrap(values: Any) -> tuple[float, float]:
    """The percentile interval of the mean over 10,000 resamples of the problems."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (10_000, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("samples", [1, 8])
def test_the_interval_of_a_share_agrees_with_a_bootstrap(rate: float, samples: int) -> None:
    """One outcome per problem, or the mean of several whose difficulty differs between problems."""
    rng = np.random.default_rng(3)
    difficulty = np.full(400, rate) if samples == 1 else rng.beta(4 * rate, 4 * (1 - rate), 400)
    shares = rng.binomial(samples, difficulty) / samples
    found = mean_share(shares.tolist())
    assert found.value == pytest.approx(shares.mean())
    assert (found.low, found.high) == pytest.approx(bootstrap(shares), abs=0.008)


def test_the_interval_of_one_outcome_per_problem_is_that_of_wilson() -> None:
    """Wilson (1927), for 8 of 10: 0.4902 to 0.9433; all correct or all wrong still have an interval."""
    found = mean_share([1.0] * 8 + [0.0] * 2)
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert mean_share([1.0] * 10).low == pytest.approx(0.7225, abs=1e-4)
    assert mean_share([0.0] * 10).high == pytest.approx(0.2775, abs=1e-4)
    assert mean_share([]) == Estimate(value=0.0, low=0.0, high=1.0)


def test_the_interval_of_a_difference_agrees_with_a_bootstrap_of_pairs() -> None:
    """Problems without a grade on either side do not count."""
    rng = np.random.default_rng(5)
    first = (rng.random(400) < 0.4).astype(float)
    second = np.maximum(first, rng.random(400) < 0.3)
    found = mean_difference([*first, None, 1.0], [*second, 1.0, None])
    assert found.value == pytest.approx((second - first).mean())
    assert (found.low, found.high) == pytest.approx(bootstrap(second - first), abs=0.008)
    assert mean_difference([], []) == Estimate(value=0.0, low=-1.0, high=1.0)


def test_pass_at_k_is_the_share_of_draws_with_a_correct_completion() -> None:
    """Counted over all draws of k completions without replacement."""
    outcomes = [True, False, False, True, False, False]
    for k in range(1, 7):
        draws = [any(draw) for draw in combinations(outcomes, k)]
        assert pass_at(k, correct=2, samples=6) == pytest.approx(sum(draws) / len(draws))


async def test_accuracy_is_reported_overall_and_by_type_without_ungraded_problems() -> None:
    """A problem that no reward applies to is counted as ungraded."""
    problems = [Problem(prompt="", answer=answer, type=answer[0]) for answer in ("a1", "a2", "b1", "b2", "c1")]

    async def is_correct(problem: Problem, text: str) -> bool | None:
        return None if problem.type == "c" else problem.answer == text

    grades = await grade(problems, ["a1", "-", "b1", "b2", "c1"], is_correct)
    assert grades == [True, False, True, True, None]
    found = accuracy(problems, grades)
    assert (found.problems, found.ungraded, found.overall.value) == (4, 1, 0.75)
    assert {kind: share.value for kind, share in found.by_type.items()} == {"a": 0.5, "b": 1.0}
