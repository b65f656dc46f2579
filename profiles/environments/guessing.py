"""The guessing game: secrets, questions, hints and what a guess earns. Nothing but the standard library.

"Ann has many coins. How many coins now?": the words are those of the problems that ship with Clotho, so that the
policy that ships with it can play. After a wrong guess a hint says on which side of it the secret lies. The question
tells nothing of the secret, so that all there is to learn is to begin in the middle and to heed the hints.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES = ("Ann", "Ben", "Eva", "Max", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")

CLOSENESS = 0.3
"""What a wrong guess earns, at most."""

LATER = 0.2
"""What every turn before the right guess takes away."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """A secret from 1 to `largest`, and whose it is."""

    name: str
    things: str
    secret: int
    largest: int

    @property
    def question(self) -> str:
        """The first message of a game."""
        return f"{self.name} has many {self.things}. How many {self.things} now?"

    def hint(self, guess: int) -> str:
        """The message that follows a wrong guess."""
        side = "more" if self.secret > guess else "less"
        return f"{self.name} has {side}. How many {self.things} now?"


def tell(rng: random.Random, largest: int) -> Story:
    """Make up a story."""
    return Story(name=rng.choice(NAMES), things=rng.choice(THINGS), secret=rng.randint(1, largest), largest=largest)


def compute_advantages(story: Story, turn: int, guess: int | None) -> tuple[float, str]:
    """Return what a game has earned after the guess of a turn (counted from 0), and the hint for the next one.

    The right guess earns 1, less 0.2 for every turn before it; a wrong one less than 0.3, the closer the more; none at
    all nothing. No hint: the game is over.
    """
    if guess is None:
        return 0.0, ""
    if guess == story.secret:
        return 1.0 - LATER * turn, ""
    distance = min(abs(guess - story.secret) / story.largest, 1.0)
    return CLOSENESS * (1.0 - distance), story.hint(guess)
