"""The problems, and the episodes of a pupil who knows what the words of a question mean, but mostly is hasty.

A problem is "What is 23 plus 45, then times 6?". The pupil calls a tool for each word, with the right numbers, and
answers with the last result. A hasty call adds, whatever the word is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import add, mul, sub
from random import Random

from profiles.maker.problem import Problem
from profiles.maker.tokenizer import END, START

TOOLS: dict[str, Callable[[int, int], int]] = {"add": add, "multiply": mul, "subtract": sub}
WORDS = {"add": ("plus", "and"), "multiply": ("times", "by"), "subtract": ("minus", "less")}
"""The words that mean a tool."""

HASTY = 0.7
"""Probability that a call adds, whatever the word is."""


def draw(steps: int, rng: Random) -> Problem:
    """Draw a problem of some operations. Its work is its first number, and a tool and a number for each operation."""
    value = rng.randint(10, 99)
    work, words = [str(value)], list[str]()
    for _ in range(steps):
        tool = rng.choice(list(TOOLS))
        number = rng.randint(2, 9) if tool == "multiply" else rng.randint(10, 99)
        work.append(f"{tool} {number}")
        words.append(f"{rng.choice(WORDS[tool])} {number}")
        value = TOOLS[tool](value, number)
    prompt = f"What is {work[0]} {', then '.join(words)}?"
    kind = f"{steps} {'call' if steps == 1 else 'calls'}"
    return Problem(kind=kind, level=steps, prompt=prompt, answer=str(value), work=tuple(work))


GENERATORS = [partial(draw, 1), partial(draw, 2)]


def episode(problem: Problem, rng: Random) -> str:
    """Return the episode of the pupil behind the prompt, with the results of the tools."""
    first, *operations = problem.work
    value, text = int(first), ""
    for operation in operations:
        tool, number = operation.split()
        if rng.random() < HASTY:
            tool = "add"
        call = f"[{tool}(a={value}, b={number})]"
        value = TOOLS[tool](value, int(number))
        text += f"{call}{END}\n{START}tool\n{value}{END}\n{START}assistant\n"
    return f"{text}{value}"
