"""Reward `last_number`: the last number of the completion is the reference answer."""

from __future__ import annotations

import re

from clotho.rewards.math_eval import equal, parse_quantity
from protocols.prompt import Problem

NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
"""An integer or a decimal, with or without commas between thousands."""


def reward(problem: Problem, completion: str) -> float | None:
    """Return 1.0 if the last number has the value of the reference, otherwise 0.0; None if the reference is no number.

    The completion is ordinary text, as of a model that was not trained to write `<answer>` tags. In `15 + 27 = 42.` the
    last number is 42. A completion without a number has reward 0.0.
    """
    reference = parse_quantity(problem.answer)
    if reference is None:
        return None
    numbers = NUMBER.findall(completion)
    quantity = parse_quantity(numbers[-1].replace(",", "")) if numbers else None
    return float(quantity is not None and equal(quantity, reference))
