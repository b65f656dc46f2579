"""A safe evaluator of written arithmetic: exact rational numbers, every cost bounded, nothing handed to Python.

The numbers and signs of written arithmetic.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import gcd

from msgspec import Struct

MAX_DIGITS = 100
"""Characters of one written number."""

TOKEN = re.compile(
    r"""\s*(?:
      (?P<mixed>[0-9]+\s+[0-9]+/[0-9]+)(?![0-9.])
    | (?P<number>
        (?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)
        (?:[eE][-+]?[0-9]{1,3}(?![0-9]))?
      )
    | (?P<sign>\*\*|//|[-+*/%()])
    )""",
    re.VERBOSE,
)
UNIT = r"(?:[^\W\d_]|°)+(?:\*\*\(?-?[0-9]\)?)?"
UNITS = re.compile(rf"{UNIT}(?:[ /*.-]+{UNIT}){{0,3}}")


class EvaluationError(ValueError):
    """The text is no arithmetic, has no value, or would cost too much."""


def tokenize(expression: str) -> list[str]:
    """Return the numbers and signs of an expression; up to four words after them are a unit and left out."""
    tokens, position = [], 0
    while match := TOKEN.match(expression, position):
        token = match[0].strip()
        if len(token) > MAX_DIGITS:
            raise EvaluationError("a number has too many digits")
        tokens.append(token)
        position = match.end()
    rest = expression[position:].strip()
    if rest and not UNITS.fullmatch(rest):
        raise EvaluationError(f"cannot read {rest[:40]!r}")
    return tokens


MAX_DEPTH = 32
"""Parentheses and exponents inside one another."""

MAX_BITS = 4096
"""Size of any numerator or denominator on the way."""

Operation = tuple[str, Fraction, Fraction]


class Quantity(Struct, frozen=True, kw_only=True):
    """What an expression comes to, and how it was written.

    percent: it ends in a percent sign, which `value` counts as hundredths. decimal: some number in it has a
    decimal point or exponent. ratio: numerator and denominator where it is one fraction of whole numbers in lowest
    terms. finished: a number, mixed number or such a fraction; nothing is left to compute.
    """

    value: Fraction
    percent: bool
    decimal: bool
    ratio: tuple[int, int] | None
    finished: bool


def evaluate(expression: str) -> Quantity:
    """Evaluate + - * / // % ** with parentheses over decimals, mixed numbers, thousands separators and percents.

    Words after the expression are taken for its unit and ignored: `42 apples`, `3 m/s`. A percent sign before a number
    or parenthesis is the remainder, elsewhere hundredths. Powers bind tighter than the sign before them and to the
    right, and their exponents are whole. Raises EvaluationError.
    """
    parser = _Parser(tokenize(expression))
    try:
        value = parser.sum(0)
    except ZeroDivisionError:
        raise EvaluationError("division by zero") from None
    if parser.next is not None:
        raise EvaluationError(f"unexpected {parser.next!r}")
    ratio = _ratio(parser.operations)
    return Quantity(
        value=value,
        percent=parser.percent_last,
        decimal=parser.decimal,
        ratio=ratio,
        finished=not parser.operations or ratio is not None,
    )


def _ratio(operations: list[Operation]) -> tuple[int, int] | None:
    if len(operations) != 1 or operations[0][0] != "/":
        return None
    _, over, under = operations[0]
    if over.denominator != 1 or under.denominator != 1 or under < 2 or gcd(int(over), int(under)) != 1:
        return None
    return int(over), int(under)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise EvaluationError("a number is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > MAX_BITS:
        raise EvaluationError("an exponent is not whole or too large")
    return Fraction(base ** int(exponent))


class _Parser:
    """Recursive descent: sum > product > signed > power > atom."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self.operations: list[Operation] = []
        self.decimal = False
        self.percent_last = False

    @property
    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise EvaluationError("the expression is incomplete")
        self._at += 1
        self.percent_last = False
        return token

    def _apply(self, sign: str, left: Fraction, right: Fraction) -> Fraction:
        self.operations.append((sign, left, right))
        match sign:
            case "+":
                return _bounded(left + right)
            case "-":
                return _bounded(left - right)
            case "*":
                return _bounded(left * right)
            case "/":
                return _bounded(left / right)
            case "//":
                return Fraction(left // right)
            case "%":
                return _bounded(left % right)
            case _:
                return _power(left, right)

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next in ("+", "-"):
            value = self._apply(self._take(), value, self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while self.next in ("*", "/", "//", "%"):
            value = self._apply(self._take(), value, self._signed(depth))
        return value

    def _signed(self, depth: int) -> Fraction:
        negative = False
        while self.next in ("+", "-"):
            negative ^= self._take() == "-"
        value = self._atom(depth)
        if self.next == "**":
            if depth >= MAX_DEPTH:
                raise EvaluationError("too deeply nested")
            value = self._apply(self._take(), value, self._signed(depth + 1))
        return -value if negative else value

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            if depth >= MAX_DEPTH:
                raise EvaluationError("too deeply nested")
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise EvaluationError("a parenthesis is not closed")
        elif token[0].isdigit() or token[0] == ".":
            value = self._number(token)
        else:
            raise EvaluationError(f"unexpected {token!r}")
        return value / 100 if self._percent() else value

    def _number(self, token: str) -> Fraction:
        self.decimal = self.decimal or any(mark in token for mark in ".eE")
        return sum((Fraction(part) for part in token.replace(",", "").split()), Fraction(0))

    def _percent(self) -> bool:
        following = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else ")"
        if self.next != "%" or following == "(" or following[0].isdigit() or following[0] == ".":
            return False
        self._take()
        self.percent_last = True
        return True
