"""Make the problems of the profile `proof-chain-sum` again: `python -m profiles.chain_sum --out DIR --seed 0`.

Needs the extra `reasoning-gym`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from profiles.embedded_maker.problems import column_steps
from profiles.maker.command import run_command
from profiles.maker.problem import completion

HELD_OUT, TRAINING, DEMONSTRATIONS = 128, 1024, 1024
"""Rows of the three files; no question occurs twice in them."""

DRAWN = 5000
"""Problems that the dataset draws, some of them more than once."""

SETTINGS: Mapping[str, int] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def work(entry: Mapping[str, Any]) -> Sequence[str]:
    """Return the columns of a sum or difference of two numbers; for a negative result, those of its opposite."""
    first, sign, second = entry["metadata"]["expression"].split()
    a, b = int(first), int(second)
    steps = column_steps(max(a, b), sign, min(a, b)) if sign == "-" else column_steps(a, sign, b)
    return steps or [f"0{sign}0=0"]


def write(path: Path, rows: Iterable[object]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(out: Path, seed: int) -> None:
    """Write the three files; the same seed writes the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = import_module("reasoning_gym").create_dataset("chain_sum", size=DRAWN, seed=seed, **SETTINGS)
    entries = list({entry["question"]: entry for entry in drawn}.values())
    Random(seed).shuffle(entries)  # problems with few digits occur early
    rows = [{"prompt": one["question"], "answer": one["answer"], "type": "chain_sum"} for one in entries]
    first = HELD_OUT + TRAINING
    write(out / "heldout.jsonl", rows[:HELD_OUT])
    write(out / "train.jsonl", rows[HELD_OUT:first])
    shown = [
        row | {"completion": completion(",".join(work(one)), one["answer"])}
        for row, one in zip(rows, entries, strict=True)
    ]
    write(out / "demonstrations.jsonl", shown[first : first + DEMONSTRATIONS])


if __name__ == "__main__":
    run_command("python -m profiles.chain_sum", __doc__, make)
