"""The problems: a number of two to four digits times one digit, worked out by long multiplication.

Pure Python, deterministic from the `random.Random` that is passed in. A problem needs one product of the times table
per digit. The work has the same width for every digit, units first:

    47 * 8  ->  56, 32+5=37  ->  376
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from random import Random

from profiles.maker.problem import Generator, Problem

KINDS: dict[str, int] = {"two digits": 2, "three digits": 3, "four digits": 4}
"""Digits of the number, by the name in the data's `type` field."""

ROWS = range(3, 10)
"""The multipliers: rows of the times table."""

Product = Callable[[int, int], int]
"""Returns the product of a digit and a multiplier, rightly or wrongly."""


def right(digit: int, row: int) -> int:
    """Return the product."""
    return digit * row


def long_multiplication(number: int, row: int, product: Product = right) -> tuple[tuple[str, ...], str]:
    """Return the work and the answer of number * row, with products from `product`.

    >>> long_multiplication(47, 8)   ->  (("56", "32+5=37"), "376")
    """
    work: list[str] = []
    answer, carry = "", 0
    for digit in map(int, reversed(str(number))):
        found = product(digit, row)
        total = found + carry
        work.append(f"{found:02d}+{carry}={total:02d}" if work else f"{found:02d}")
        carry = total // 10
        answer = f"{total % 10}{answer}"
    return tuple(work), str(int(f"{carry}{answer}"))


def factors(problem: Problem) -> tuple[int, int]:
    """Read number and multiplier from the prompt of a problem."""
    number, row = map(int, re.findall(r"\d+", problem.prompt))
    return number, row


def draw_kind(rng: Random, kind: str) -> Problem:
    """Draw a problem of one kind."""
    digits = KINDS[kind]
    number, row = rng.randrange(10 ** (digits - 1), 10**digits), rng.choice(ROWS)
    work, answer = long_multiplication(number, row)
    return Problem(kind, digits - 1, f"What is {number} * {row}?", answer, work)


GENERATORS: list[Generator] = [partial(draw_kind, kind=kind) for kind in KINDS]
"""One generator for each kind."""


def draw(rng: Random) -> Problem:
    """Draw a problem; every kind is equally likely."""
    return rng.choice(GENERATORS)(rng)
