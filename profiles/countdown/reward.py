"""The reward of TinyZero's Countdown."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

from clotho.rewards.answer import answer_text
from protocols.prompt import Problem

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def solved(problem: Problem, completion: str) -> float:
    """Return 1 for an expression of all numbers, each used once, with the value of the target; 0.1 for another value.

    Without such an expression, the reward is 0. Operators are + - * / with parentheses.
    """
    answer = answer_text(completion, "hashes") or ""
    *numbers, target = re.findall(r"\d+", problem.prompt)
    if sorted(re.findall(r"\d+", answer)) != sorted(numbers):
        return 0.0
    try:
        return 1.0 if value(ast.parse(answer, mode="eval").body) == int(target) else 0.1
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0


def value(node: ast.expr) -> Fraction:
    """Return the value of an expression. Raises ValueError for anything but integers and the four operators."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and (operation := OPERATORS.get(type(node.op))):
        found: Fraction = operation(value(node.left), value(node.right))
        return found
    raise ValueError("not an expression of integers")
