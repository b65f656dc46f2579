"""Reward `math_eval`: the answer has the numeric value of the reference answer."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from attachments.graders.arithmetic import EvaluationError, Quantity, evaluate, plain_expression
from clotho.rewards.answer import answer_text
from protocols.prompt import AnswerIn, Problem

TOLERANCE = Fraction(1, 1_000_000)
"""Relative tolerance if either side is written as a decimal."""


def reward(problem: Problem, completion: str, *, answer_in: AnswerIn = "tags") -> float | None:
    """Return 1.0 if answer and reference have the same value, otherwise 0.0; None if the reference is not a number.

    Both texts are normalized by `plain_expression` and evaluated exactly by `evaluate`. If either side is a decimal and
    the two are not both whole numbers, a relative difference of 1e-6 counts as equal. `50%` equals 0.5, and also 50 if
    the other side has no percent sign. If the reference is a finished number, the answer must be one too: an expression
    such as `15 + 27`, or a fraction copied from the prompt, has reward 0.0. So does a completion without an answer.
    """
    reference = parse_quantity(problem.answer)
    if reference is None:
        return None
    answer = answer_text(completion, answer_in)
    quantity = parse_quantity(answer) if answer is not None else None
    if quantity is None or (reference.finished and not quantity.finished):
        return 0.0
    if quantity.ratio and not reference.ratio and _is_in_prompt(quantity.ratio, problem.prompt):
        return 0.0
    return float(equal(quantity, reference))


@lru_cache(maxsize=2048)
def parse_quantity(text: str) -> Quantity | None:
    """Return the value of a text; None if the text is not arithmetic or exceeds a limit of the evaluator."""
    expression = plain_expression(text)
    if not expression:
        return None
    try:
        return evaluate(expression)
    except EvaluationError:
        return None


def equal(answer: Quantity, reference: Quantity) -> bool:
    """Return whether two quantities are equal. A percent sign on only one side may also be a unit."""
    decimal = answer.decimal or reference.decimal
    if _close(answer.value, reference.value, decimal=decimal):
        return True
    if answer.percent == reference.percent:
        return False
    without_percent = [side.value * 100 if side.percent else side.value for side in (answer, reference)]
    return _close(without_percent[0], without_percent[1], decimal=decimal)


def _close(answer: Fraction, reference: Fraction, *, decimal: bool) -> bool:
    if not decimal or answer.denominator == reference.denominator == 1:
        return answer == reference
    return abs(answer - reference) <= TOLERANCE * max(abs(answer), abs(reference))


def _is_in_prompt(ratio: tuple[int, int], prompt: str) -> bool:
    without_spaces = "".join(prompt.replace("÷", "/").split())
    return f"{ratio[0]}/{ratio[1]}" in without_spaces
