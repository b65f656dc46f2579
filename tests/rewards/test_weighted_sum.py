"""Rewards: a weighted sum of functions of (problem, text)."""

from __future__ import annotations

from typing import Any

import pytest

from clotho.rewards.values import RewardError
from clotho.rewards.weighted_sum import Rewards
from protocols.errors import ProfileError
from protocols.prompt import Problem

SUM = Problem(prompt="2 + 3?", answer="5", type="sum")
WORDS = Problem(prompt="Who?", answer="two words", type="words")
RIGHT, WRONG, BARE = "<think>x</think><answer>5</answer>", "<think>x</think><answer>6</answer>", "5"


def brevity(problem: Problem, text: str) -> float | None:
    """0.5 for a short text about numbers."""
    return None if problem.type == "words" else 0.5 * (len(text) < 10)


def test_the_sum_has_the_functions_that_apply() -> None:
    """Each with its weight."""
    reward = Rewards({brevity: 2.0}, format=0.2, math_eval=1.0)
    assert reward(SUM, RIGHT) == pytest.approx(1.2)
    assert reward(SUM, WRONG) == pytest.approx(0.2)
    assert reward(SUM, BARE) == pytest.approx(1.0)
    assert reward.values(WORDS, BARE) == {"format": 0.0}


def test_the_functions_that_read_the_answer_say_what_is_correct() -> None:
    """Without any, all own functions do."""
    reward = Rewards({brevity: 2.0}, format=0.2, math_eval=1.0)
    assert reward.correct(SUM, RIGHT)
    assert not reward.correct(SUM, WRONG)
    assert not reward.correct(WORDS, RIGHT)  # none of them applies
    assert Rewards({lambda problem, text: 1.0: 1.0}).correct(SUM, BARE)
    assert not Rewards({brevity: 1.0}).correct(SUM, BARE)


def test_the_answer_is_found_where_it_is_said_to_be() -> None:
    """As `answer_in` of a profile."""
    assert Rewards(answer_in="last_number", exact=1.0)(SUM, "it is 5") == 1.0


def test_a_function_that_fails_names_itself() -> None:
    """So does a problem that no function applies to."""

    def broken(problem: Problem, text: str) -> float:
        raise ZeroDivisionError

    with pytest.raises(RewardError, match="broken"):
        Rewards({broken: 1.0})(SUM, BARE)
    with pytest.raises(RewardError, match="math_eval"):
        Rewards(math_eval=1.0)(WORDS, BARE)


@pytest.mark.parametrize(
    ("own", "weights"), [(None, {}), (None, {"math_evil": 1.0}), ({lambda completions: [1.0]: 1.0}, {})]
)
def test_what_is_no_function_of_one_completion_is_refused(own: Any, weights: dict[str, Any]) -> None:
    """At the construction."""
    with pytest.raises(ProfileError):
        Rewards(own, **weights)
