"""The probability that the next group of a problem has a gradient."""

from __future__ import annotations

import numpy as np
import pytest

from clotho.data.group_outcomes import PRIOR, PRIOR_GROUPS, GroupOutcomes


def test_without_evidence_the_prior_of_the_status_holds() -> None:
    """A problem without a group is in between."""
    outcomes = GroupOutcomes(["a"] * 7)
    outcomes.end_step([(1, 0, 8), (2, 8, 8), (3, 1, 8), (4, 4, 8), (5, 0, 8), (6, 8, 8)])
    unseen, failed, solved, seldom, often, failed_again, solved_again = range(7)
    found = outcomes.gradient_probability()
    assert PRIOR[0] == 0.5
    assert found[failed] == found[failed_again] < found[unseen] < found[seldom] == found[often]
    assert found[solved] == found[solved_again] < found[unseen]
    outcomes.end_step([(failed_again, 0, 8), (solved_again, 8, 8)])
    found = outcomes.gradient_probability()
    assert found[failed_again] < found[failed]
    assert found[solved_again] < found[solved]


def test_the_probability_is_a_posterior_mean_of_the_groups_of_the_run() -> None:
    """By hand: two groups of problems without a group, one of which has a gradient."""
    outcomes = GroupOutcomes(["a", "a", "a", "b"])
    outcomes.end_step([(0, 3, 8), (1, 0, 8)])
    w = PRIOR_GROUPS
    status = (1 + w * PRIOR[0]) / (2 + w)
    age = (1 + w * status) / (2 + w)
    found = outcomes.gradient_probability(np.array([2, 3]))
    assert found == pytest.approx([(1 + w * age) / (2 + w), age])


def test_old_groups_count_less_and_old_statuses_have_a_probability_of_their_own() -> None:
    """Problems that are mixed become solved: what was mixed long ago has no gradient."""
    outcomes = GroupOutcomes(["a"] * 60)
    for step in range(60):
        soon, late = [(step - 1, 4, 8)] if step >= 1 else [], [(step - 20, 8, 8)] if step >= 20 else []
        outcomes.end_step([(step, 4, 8), *soon, *late])
    found = outcomes.gradient_probability()
    assert found[59] > 0.8
    assert found[40] < 0.3


def test_a_type_without_gradients_does_not_need_a_group_of_each_problem() -> None:
    """Problems without a group have the probability of their type."""
    outcomes = GroupOutcomes(["hard"] * 100 + ["useful"] * 100)
    for step in range(5):
        outcomes.end_step([group for i in range(4 * step, 4 * step + 4) for group in ((i, 0, 8), (100 + i, 4, 8))])
    found = outcomes.gradient_probability()
    assert found[99] < 0.2 < 0.8 < found[199]


def test_the_success_rate_is_that_of_the_last_group() -> None:
    """That of the type for a problem without a group, and 1/2 without any group."""
    outcomes = GroupOutcomes(["a", "a", "a", "b"])
    outcomes.end_step([(0, 2, 8), (1, 8, 8)])
    outcomes.end_step([(0, 4, 8)])
    assert outcomes.success_rates().tolist() == [0.5, 1.0, 0.75, 0.5]


def test_the_failure_rate_is_a_posterior_mean_of_the_last_group() -> None:
    """A solved problem keeps some: a group of two says little. That of the type for a problem without a group."""
    outcomes = GroupOutcomes(["a", "a", "a", "b"])
    outcomes.end_step([(0, 2, 8), (1, 2, 2)])
    outcomes.end_step([(0, 4, 8)])
    assert outcomes.failure_rates().tolist() == [0.5, 0.25, 0.375, 0.5]


def test_restored_evidence_gives_the_same_probabilities_from_then_on() -> None:
    """Bit for bit, also in a process that had other evidence and another number of steps before."""
    outcomes, other = GroupOutcomes(["a", "b", "a"]), GroupOutcomes(["a", "b", "a"])
    for step in range(9):
        outcomes.end_step([(step % 2, step % 8, 8)])
    other.end_step([(2, 1, 8)])
    other.restore(outcomes.records())
    for step in range(9):
        assert outcomes.gradient_probability().tobytes() == other.gradient_probability().tobytes()
        assert outcomes.success_rates().tobytes() == other.success_rates().tobytes()
        assert outcomes.failure_rates().tobytes() == other.failure_rates().tobytes()
        for one in (outcomes, other):
            one.end_step([(step % 3, 8 - step % 8, 8)])
