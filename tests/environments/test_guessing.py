"""The rules of the guessing game."""

from __future__ import annotations

from random import Random

import pytest

from profiles.environments import guessing

STORY = guessing.Story(name="Ann", things="coins", secret=5, largest=7)


@pytest.mark.parametrize(("turn", "reward"), [(0, 1.0), (1, 0.8), (2, 0.6)])
def test_the_right_guess_earns_less_with_every_turn_and_ends_the_game(turn: int, reward: float) -> None:
    """A fifth less each time."""
    earned, hint = guessing.compute_advantages(STORY, turn, 5)
    assert earned == pytest.approx(reward)
    assert hint == ""


def test_a_wrong_guess_earns_more_the_closer_it_is() -> None:
    """And always less than the latest right one."""
    earned = [guessing.compute_advantages(STORY, 0, guess)[0] for guess in (10**9, 9, 8, 7, 6)]
    assert earned == sorted(earned)
    assert earned[0] == 0.0
    assert earned[-1] < guessing.compute_advantages(STORY, 3, 5)[0]


def test_no_guess_earns_nothing_and_ends_the_game() -> None:
    """Whatever was guessed before."""
    assert guessing.compute_advantages(STORY, 1, None) == (0.0, "")


@pytest.mark.parametrize(
    ("guess", "hint"), [(3, "Ann has more. How many coins now?"), (6, "Ann has less. How many coins now?")]
)
def test_a_hint_says_on_which_side_of_the_guess_the_secret_lies(guess: int, hint: str) -> None:
    """In the words of the story."""
    assert guessing.compute_advantages(STORY, 0, guess)[1] == hint


def test_the_question_tells_nothing_of_the_secret() -> None:
    """It is the same for all secrets, so that games are won by guessing alone."""
    rng = Random(0)
    stories = [guessing.tell(rng, 7) for _ in range(3000)]
    assert {story.secret for story in stories} == set(range(1, 8))
    asked = {story.question for story in stories if story.secret == 3}
    assert asked == {story.question for story in stories if story.secret == 6}
