"""The rules of the guessing game."""

from __future__ import annotations

from random import Random

import pytest

from profiles.environments import guessing

STORY = guessing.Story(name="Ann", things="coins", secret=5, largest=7)


@pytest.mark.parametrize(("turn", "reward"), [(0, 1.0), (1, 0.8), (2, 0.6)])
def test_a_correct_guess_scores_less_in_later_turns_and_ends_the_game(turn: int, reward: float) -> None:
    """Each turn costs 0.2."""
    score, hint = guessing.score_guess(STORY, turn, 5)
    assert score == pytest.approx(reward)
    assert hint == ""


def test_a_closer_wrong_guess_scores_more() -> None:
    """A wrong guess always scores less than a correct guess in the last turn."""
    score = [guessing.score_guess(STORY, 0, guess)[0] for guess in (10**9, 9, 8, 7, 6)]
    assert score == sorted(score)
    assert score[0] == 0.0
    assert score[-1] < guessing.score_guess(STORY, 3, 5)[0]


def test_a_completion_without_a_guess_scores_zero_and_ends_the_game() -> None:
    """Earlier guesses do not count."""
    assert guessing.score_guess(STORY, 1, None) == (0.0, "")


@pytest.mark.parametrize(
    ("guess", "hint"), [(3, "Ann has more. How many coins now?"), (6, "Ann has less. How many coins now?")]
)
def test_a_hint_says_whether_the_secret_is_larger_or_smaller(guess: int, hint: str) -> None:
    """The hint uses the words of the question."""
    assert guessing.score_guess(STORY, 0, guess)[1] == hint


def test_the_question_is_independent_of_the_secret() -> None:
    """Questions of different secrets have the same distribution."""
    rng = Random(0)
    stories = [guessing.make_story(rng, 7) for _ in range(3000)]
    assert {story.secret for story in stories} == set(range(1, 8))
    questions = {story.question for story in stories if story.secret == 3}
    assert questions == {story.question for story in stories if story.secret == 6}
