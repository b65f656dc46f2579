"""The games, and those of a pupil who knows what the marks mean, but mostly does not look at them.

A game begins with "Ann has a word. Which word?". The pupil guesses, and reads the marks of the environment. A careful
guess is a word that all marks so far allow; a hasty one is always the same word of the same turn.
"""

from __future__ import annotations

from random import Random

from profiles.environments.wordle import WORDS, Wordle, hint, marks
from profiles.maker.problem import Problem
from profiles.maker.tokenizer import END, START

NAMES = ("Ann", "Ben", "Eva", "Max", "Tom")
HELD_OUT_NAME = "Zoe"

HASTY = 0.7
"""Probability that a guess pays no attention to the marks."""

FAVOURITES = ("bat", "dig", "men", "cut")
"""The hasty guess of each turn, and the first guess of every game."""


def game(name: str, secret: str) -> Problem:
    """Return a game. Its work is the secret."""
    return Problem(kind="game", level=1, prompt=f"{name} has a word. Which word?", answer=secret, work=(secret,))


def draw(rng: Random) -> Problem:
    """Draw a game for the pupil."""
    return game(rng.choice(NAMES), rng.choice(WORDS))


def allowed(said: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Return the words that guesses with their marks allow."""
    return [word for word in WORDS if all(marks(guess, word) == found for guess, found in said)]


def episode(problem: Problem, rng: Random) -> str:
    """Return the game of the pupil behind the prompt, with the hints."""
    (secret,) = problem.work
    said, text = list[tuple[str, tuple[str, ...]]](), ""
    for turn in range(Wordle.turns):
        hasty = turn == 0 or rng.random() < HASTY
        guess = FAVOURITES[turn] if hasty else rng.choice(allowed(said))
        text += " ".join(guess)
        if guess == secret or turn == Wordle.turns - 1:
            return text
        said.append((guess, marks(guess, secret)))
        text += f"{END}\n{START}user\n{hint(guess, secret)}{END}\n{START}assistant\n"
    return text
