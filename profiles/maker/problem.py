"""A problem of a task, distinct problems from a seed, and the files that contain them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True)
class Problem:
    """One question with everything a demonstrator may say about it."""

    kind: str
    level: int
    prompt: str
    answer: str
    """The right answer: a number, or the letter of an option."""
    work: tuple[str, ...]
    """The careful steps, in order; the last one determines the answer."""
    wrong: tuple[str, ...] = ()
    """The other options of a multiple choice; else nothing."""


Generator = Callable[[Random], Problem]
"""Draws a problem of one kind and level."""


def draw_distinct(
    rng: Random, generators: Sequence[Generator], count: int, *, exclude: Iterable[str] = ()
) -> list[Problem]:
    """Draw `count` problems in random order. Each generator draws equally many.

    All prompts are distinct, and no prompt is in `exclude`.
    """
    seen = set(exclude)
    problems: list[Problem] = []
    while len(problems) < count:
        problem = generators[len(problems) % len(generators)](rng)
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            problems.append(problem)
    rng.shuffle(problems)
    return problems


def make_problems(
    generators: Sequence[Generator], seed: int, *, training: int, held_out: int
) -> tuple[list[Problem], list[Problem]]:
    """Draw the training problems and the held-out problems of a seed; no prompt is in both."""
    rng = Random(seed)
    reserved = draw_distinct(rng, generators, held_out)
    return draw_distinct(rng, generators, training, exclude=[problem.prompt for problem in reserved]), reserved


def write_problems(
    path: Path, problems: Iterable[Problem], demonstration: Callable[[Problem], str] | None = None
) -> None:
    """Write JSON lines of `prompt`, `answer` (text), `type` (the kind) and `completion` if there are demonstrations."""
    rows = (
        {"prompt": problem.prompt, "answer": problem.answer, "type": problem.kind}
        | ({"completion": demonstration(problem)} if demonstration else {})
        for problem in problems
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def completion(work: str, answer: str) -> str:
    """Put work and answer into the form every completion should have."""
    return f"<think>{work}</think><answer>{answer}</answer>"
