"""The demonstrator: a pupil who knows long multiplication, but not the whole times table.

The pupil knows the rows up to `KNOWN` and the products of the digits up to it. Elsewhere the pupil guesses a multiple
of the row, each with the same probability, and goes on correctly from there. So demonstrations contain no information
about the products that the pupil does not know, except that they are multiples of their row.
"""

from __future__ import annotations

from random import Random

from profiles.maker.problem import Problem, completion
from profiles.times_table_maker.problems import factors, long_multiplication

KNOWN = 3
"""A product is known if one of its factors is at most this number."""

MULTIPLES = range(2, 10)
"""Factors of the row that a guess chooses from."""


def is_known(digit: int, row: int) -> bool:
    """Whether the pupil knows a product of the times table."""
    return digit <= KNOWN or row <= KNOWN


def demonstrate(problem: Problem, rng: Random, step: int) -> str:
    """Let the pupil solve `problem`."""

    def product(digit: int, row: int) -> int:
        return row * (digit if is_known(digit, row) else rng.choice(MULTIPLES))

    work, answer = long_multiplication(*factors(problem), product)
    return completion(",".join(work), answer)


def teach_all(problem: Problem, rng: Random, step: int) -> str:
    """Solve `problem` with every product right: supervised learning from the full distribution."""
    return completion(",".join(problem.work), problem.answer)
