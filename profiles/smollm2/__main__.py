"""Make the problems of the profile `smollm2` again: `python -m profiles.smollm2 --out DIR --seed 0`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

HELD_OUT, TRAINING = 256, 1024
"""Problems in heldout.jsonl and in train.jsonl; no pair of numbers occurs twice in both together, in either order."""

NUMBERS = range(10, 100)


def make_problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Draw the pairs of numbers for training and for evaluation that belong to a seed."""
    rng = Random(seed)
    unordered = [(first, second) for first in NUMBERS for second in NUMBERS if first <= second]
    drawn = [tuple(rng.sample(pair, 2)) for pair in rng.sample(unordered, HELD_OUT + TRAINING)]
    pairs = [(first, second) for first, second in drawn]
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def write_problems(path: Path, pairs: list[tuple[int, int]]) -> None:
    """Write JSON lines of `prompt`, `answer` (text) and `type`."""
    rows = (
        {"prompt": f"{first} plus {second} equals", "answer": str(first + second), "type": "addition"}
        for first, second in pairs
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(out: Path, seed: int) -> None:
    """Write the two files; the same seed writes the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    training, held_out = make_problems(seed)
    write_problems(out / "train.jsonl", training)
    write_problems(out / "heldout.jsonl", held_out)


def main() -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(prog="python -m profiles.smollm2", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    arguments = parser.parse_args()
    make(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
