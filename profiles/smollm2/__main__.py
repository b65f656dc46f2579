"""Make the problems of the profile `smollm2` again: `python -m profiles.smollm2 --out DIR --seed 0`."""

from __future__ import annotations

from pathlib import Path
from random import Random

from profiles.maker.command import run_command
from profiles.maker.problem import Problem, write_problems

HELD_OUT, TRAINING = 256, 1024
"""Problems in heldout.jsonl and in train.jsonl; no pair of numbers occurs twice in both together, in either order."""

NUMBERS = range(10, 100)


def make_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw the additions for training and for evaluation that belong to a seed."""
    rng = Random(seed)
    unordered = [(first, second) for first in NUMBERS for second in NUMBERS if first <= second]
    problems = []
    for pair in rng.sample(unordered, HELD_OUT + TRAINING):
        first, second = rng.sample(pair, 2)
        prompt, answer = f"{first} plus {second} equals", str(first + second)
        problems.append(Problem(kind="addition", level=1, prompt=prompt, answer=answer, work=()))
    return problems[HELD_OUT:], problems[:HELD_OUT]


def make(out: Path, seed: int) -> None:
    """Write the two files; the same seed writes the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    training, held_out = make_problems(seed)
    write_problems(out / "train.jsonl", training)
    write_problems(out / "heldout.jsonl", held_out)


if __name__ == "__main__":
    run_command("python -m profiles.smollm2", __doc__, make)
