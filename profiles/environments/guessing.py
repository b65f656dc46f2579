"""The guessing game: secrets, questions, hints, scores, and an environment. Uses only the standard library.

A question is "Ann has many coins. How many coins now?". Its words occur in the problems that are part of Clotho, so
that Clotho's small policy can play. After a wrong guess, a hint says whether the secret is larger or smaller. The
question contains no information about the secret: the policy can only learn to start in the middle and to follow hints.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

NAMES = ("Ann", "Ben", "Eva", "Max", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")

WRONG_GUESS_SCORE = 0.3
"""Upper limit of the score of a wrong guess."""

TURN_PENALTY = 0.2
"""Deduction for every turn before the correct guess."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """One game: a secret from 1 to `largest`, and the words of the question."""

    name: str
    things: str
    secret: int
    largest: int

    @property
    def question(self) -> str:
        """The first message of a game."""
        return f"{self.name} has many {self.things}. How many {self.things} now?"

    def hint(self, guess: int) -> str:
        """Return the message after a wrong guess."""
        side = "more" if self.secret > guess else "less"
        return f"{self.name} has {side}. How many {self.things} now?"


def make_story(rng: random.Random, largest: int) -> Story:
    """Return a random game."""
    return Story(name=rng.choice(NAMES), things=rng.choice(THINGS), secret=rng.randint(1, largest), largest=largest)


def score_guess(story: Story, turn: int, guess: int | None) -> tuple[float, str]:
    """Return the score of a game after the guess of `turn` (counted from 0), and the hint for the next turn.

    The score is 1 - 0.2 * turn for the correct guess, less than 0.3 for a wrong guess depending on its distance, and 0
    if the completion contains no guess. An empty hint means that the game is over.
    """
    if guess is None:
        return 0.0, ""
    if guess == story.secret:
        return 1.0 - TURN_PENALTY * turn, ""
    distance = min(abs(guess - story.secret) / story.largest, 1.0)
    return WRONG_GUESS_SCORE * (1.0 - distance), story.hint(guess)


class Guessing:
    """The environment of one game, for `agent.environment`: 1 for a game that was won, less than 0.3 for the others."""

    turns = 3

    def reset(self, name: str, things: str, secret: int) -> None:
        """Begin a game. The prompt is the question."""
        self._story = Story(name=name, things=things, secret=secret, largest=7)
        self._turn, self.reward = 0, 0.0

    def step(self, text: str) -> str | None:
        """Score a guess; return the hint, or None when the game is over."""
        found = re.search(r"<answer>\s*(\d{1,9})\s*</answer>", text)
        guess = int(found[1]) if found else None
        score, hint = score_guess(self._story, self._turn, guess)
        self.reward = 1.0 if guess == self._story.secret else score
        self._turn += 1
        return hint if self._turn < self.turns and hint else None
