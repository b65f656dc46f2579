"""The reward for an answer of the right numeric value."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from clotho.rewards.answer import answer_text
from clotho.rewards.arithmetic import EvaluationError, Quantity, evaluate
from clotho.rewards.notation import plain
from protocols.prompt import Problem

TOLERANCE = Fraction(1, 1_000_000)
"""Relative difference forgiven where one side is written as a decimal."""


def reward(problem: Problem, completion: str) -> float | None:
    """Return 1.0 where the answer has the value of the reference, otherwise 0.0; None where the reference is no number.

    Both are read by `notation.plain` and evaluated by `arithmetic.evaluate`, exactly; where one of them is a decimal,
    and not both are whole, a relative difference of 1e-6 is forgiven. `50%` equals 0.5 and, as a bare percentage, 50.
    Where the reference is a finished number the answer must be one too: `15 + 27`, left to be computed, or a fraction
    copied from the question, would otherwise be rewarded like its result. A completion without an answer has 0.0.
    """
    wanted = quantity(problem.answer)
    if wanted is None:
        return None
    answer = answer_text(completion)
    given = quantity(answer) if answer is not None else None
    if given is None or (wanted.finished and not given.finished):
        return 0.0
    if given.ratio and not wanted.ratio and _asked(given.ratio, problem.prompt):
        return 0.0
    return float(same(given, wanted))


@lru_cache(maxsize=2048)
def quantity(text: str) -> Quantity | None:
    """Return what a text comes to; None where it is no arithmetic or exceeds a bound of the evaluator."""
    expression = plain(text)
    if not expression:
        return None
    try:
        return evaluate(expression)
    except EvaluationError:
        return None


def same(given: Quantity, wanted: Quantity) -> bool:
    """Say whether two quantities are equal; a percent sign on one side alone may also be a unit."""
    if _close(given.value, wanted.value, decimal=given.decimal or wanted.decimal):
        return True
    if given.percent == wanted.percent:
        return False
    bare = [side.value * 100 if side.percent else side.value for side in (given, wanted)]
    return _close(bare[0], bare[1], decimal=given.decimal or wanted.decimal)


def _close(given: Fraction, wanted: Fraction, *, decimal: bool) -> bool:
    if not decimal or given.denominator == wanted.denominator == 1:
        return given == wanted
    return abs(given - wanted) <= TOLERANCE * max(abs(given), abs(wanted))


def _asked(ratio: tuple[int, int], prompt: str) -> bool:
    squeezed = "".join(prompt.replace("÷", "/").split())
    return f"{ratio[0]}/{ratio[1]}" in squeezed
