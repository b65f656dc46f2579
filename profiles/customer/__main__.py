"""Make the problems and demonstrations of the profile `proof-customer`: `python -m profiles.customer --out DIR`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

from profiles.calculator_maker.problems import draw
from profiles.environments.customer import Customer
from profiles.maker.command import run_command
from profiles.maker.problem import Problem

HELD_OUT, TRAINING, DEMONSTRATIONS = 128, 1024, 1024
"""Rows of heldout.jsonl, train.jsonl and demonstrations.jsonl; a first question is in one of them only."""

CHANGES = (2, 3)
"""Numbers of changes, evenly."""

HASTY = 0.5
"""Probability that a call of a demonstration adds, whatever the word is."""


def question_and_changes(problem: Problem) -> tuple[str, list[str]]:
    """Return the first question of the customer, and the changes that follow."""
    first, *later = problem.prompt.removesuffix("?").split(", then ")
    return f"{first}?", later


def conversation(problem: Problem, rng: Random) -> list[dict[str, str]]:
    """Return a conversation of the customer with a hasty pupil."""
    question, changes = question_and_changes(problem)
    customer = Customer()
    customer.reset(problem.answer, changes)
    messages, value = [{"role": "user", "content": question}], int(problem.work[0])
    for operation in problem.work[1:]:
        tool, number = operation.split()
        if rng.random() < HASTY:
            tool = "add"
        call = f"[{tool}(a={value}, b={number})]"
        value = getattr(customer, tool)(value, int(number))
        said = {"assistant": call, "tool": str(value)}, {"assistant": str(value), "user": customer.step(str(value))}
        messages += [{"role": role, "content": text} for one in said for role, text in one.items() if text is not None]
    return messages


def write(path: Path, rows: Iterable[object]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def row(problem: Problem) -> dict[str, object]:
    """Return the columns of a problem: those that `Customer.reset` takes, and the prompt."""
    question, changes = question_and_changes(problem)
    return {"prompt": question, "answer": problem.answer, "type": f"{problem.level} changes", "changes": changes}


def make(out: Path, seed: int) -> None:
    """Write the three files; the same seed writes the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    rng, found = Random(seed), dict[str, Problem]()
    while len(found) < HELD_OUT + TRAINING + DEMONSTRATIONS:
        problem = draw(CHANGES[len(found) % len(CHANGES)], rng)
        found.setdefault(question_and_changes(problem)[0], problem)
    problems = list(found.values())
    write(out / "heldout.jsonl", map(row, problems[:HELD_OUT]))
    write(out / "train.jsonl", map(row, problems[HELD_OUT : HELD_OUT + TRAINING]))
    write(
        out / "demonstrations.jsonl",
        ({"messages": conversation(one, rng)} for one in problems[HELD_OUT + TRAINING :]),
    )


if __name__ == "__main__":
    run_command("python -m profiles.customer", __doc__, make)
