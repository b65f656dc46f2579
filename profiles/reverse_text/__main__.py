"""Make the problems of the profile `proof-reverse-text`: `python -m profiles.reverse_text --out DIR --seed 0`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random

from profiles.maker.command import run_command
from profiles.maker.problem import Problem, draw_distinct, write_problems

HELD_OUT, TRAINING = 128, 1024
"""Problems in heldout.jsonl and in train.jsonl; no text occurs twice in both together."""

WORDS = tuple("".join(letters) for letters in product("bdgklmnprt", "aeiou"))
COUNT = 3
"""Words of a text."""


def problem(rng: Random) -> Problem:
    """Draw a text."""
    text = " ".join(rng.choices(WORDS, k=COUNT))
    return Problem(kind="reverse", level=COUNT, prompt=text, answer=text[::-1], work=())


def make(out: Path, seed: int) -> None:
    """Write the two files; the same seed writes the same bytes. Each problem has a demonstration."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = draw_distinct(Random(seed), [problem], HELD_OUT + TRAINING)
    write_problems(out / "train.jsonl", drawn[HELD_OUT:], lambda one: one.answer)
    write_problems(out / "heldout.jsonl", drawn[:HELD_OUT])


if __name__ == "__main__":
    run_command("python -m profiles.reverse_text", __doc__, make)
