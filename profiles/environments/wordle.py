"""Wordle with three letters, for `agent.environment`. Uses only the standard library.

A guess is written letter by letter, such as "c a t". The answer marks each letter: "c yes, a moved, t no".
"""

from __future__ import annotations

WORDS = (
    "bad", "bag", "bat", "bed", "beg", "bet", "big", "bit", "bog", "bug", "but", "cab", "cat", "cot", "cub", "cut",
    "dig", "dog", "dot", "get", "got", "gum", "man", "mat", "men", "met", "mob", "mud", "nag", "net", "nod", "nut",
)  # fmt: skip
"""The words that may be guessed, of which one is the secret."""


def marks(guess: str, secret: str) -> tuple[str, ...]:
    """Return what is said of each letter: `yes`, `moved` for one that belongs to another place, or `no`.

    A letter is moved at most as often as the secret has it in places that were not guessed.
    """
    left = [there for here, there in zip(guess, secret, strict=True) if here != there]
    found = []
    for here, there in zip(guess, secret, strict=True):
        if here == there:
            found.append("yes")
        elif here in left:
            left.remove(here)
            found.append("moved")
        else:
            found.append("no")
    return tuple(found)


def hint(guess: str, secret: str) -> str:
    """Return the message after a wrong guess."""
    return ", ".join(f"{letter} {mark}" for letter, mark in zip(guess, marks(guess, secret), strict=True))


class Wordle:
    """One game: 1 for a secret that was found; otherwise 0.1 for each letter of the last guess in its place."""

    turns = 4

    def reset(self, secret: str) -> None:
        """Begin a game."""
        self._secret, self._turn, self.reward = secret, 0, 0.0

    def step(self, text: str) -> str | None:
        """Score a guess; return the marks, or None when the game is over."""
        guess = "".join(text.split())
        self._turn += 1
        if guess not in WORDS:
            self.reward = 0.0
            return None if self._turn >= self.turns else "no word"
        said = marks(guess, self._secret)
        self.reward = 1.0 if guess == self._secret else 0.1 * said.count("yes")
        return None if guess == self._secret or self._turn >= self.turns else hint(guess, self._secret)
