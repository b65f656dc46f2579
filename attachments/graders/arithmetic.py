# ruff: noqa: RUF001
"""Parsing and evaluation of arithmetic as people write it: Unicode, LaTeX, units, percents.

`plain_expression` converts a text to plain ASCII notation. `evaluate` computes it with exact rational numbers, without
Python's `eval`, and with a limit on every cost.
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import gcd

from msgspec import Struct

MAX_CHARACTERS = 1000
"""Longer texts are not parsed."""

MAX_NESTED_FRACTIONS = 16
"""Levels of nested LaTeX fractions and powers that are expanded."""

SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁻]+")
VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
LATEX_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mbox|mathbf|textbf)\s*\{([^{}]*)\}")
LATEX_POWER = re.compile(r"\^\s*\{([^{}]*)\}")
LATEX_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
BOLD = re.compile(r"(?<![\w)\]}])\*\*([^*\n]+)\*\*(?![\w(])")
"""Bold text of Markdown, as opposed to a power."""

PHRASE = re.compile(r"[^\W\d_][^\d=:]{0,80}?(?:\bis\b|\bare\b|:)\s*")

ASCII_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "⁄": "/", "∕": "/", "≈": "=", "^": "**"}
    | dict.fromkeys("$€£¥", " ")
)  # fmt: skip

LATEX_COMMANDS = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\left": "", r"\right": "", r"\times": "*", r"\cdot": "*", r"\div": "/",
    r"\approx": "=", r"^\circ": "°", r"^{\circ}": "°", r"\%": "%", r"\$": "", r"\(": "", r"\)": "", r"\[": "",
    r"\]": "",     "{,}": ",", r"\,": "", r"\!": "", r"\;": " ", r"\:": " ", r"\ ": " ",
}  # fmt: skip


def plain_expression(text: str) -> str | None:
    r"""Return the last expression of a text in plain ASCII notation; None if the text is too long.

    `The answer is $\boxed{\frac{1}{2}}$.` gives `((1)/(2))`, `15 + 27 = 42` gives `42`, `3 × 10²` gives `3 * 10**(2)`,
    `1½` gives `1 1/2`, and `... #### 72` (the format of GSM8K) gives `72`. Nothing is evaluated.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = _latex(_unicode(BOLD.sub(r"\1", text)))
    text = text.rpartition("####")[2].translate(ASCII_SIGNS).rpartition("=")[2].strip()
    phrase = PHRASE.match(text)
    text = text[phrase.end() :] if phrase else text
    text = text.lstrip(" \t\r\n*`").rstrip(" \t\r\n*`.,;!")
    return text if len(text) <= MAX_CHARACTERS else None


def _unicode(text: str) -> str:
    text = SUPERSCRIPT.sub(lambda match: f"**({match[0]})", text)
    text = VULGAR_FRACTION.sub(lambda match: f" {match[0]}", text)
    return unicodedata.normalize("NFKC", text)


def _latex(text: str) -> str:
    if "\\" not in text and "{" not in text:
        return text
    for command, replacement in LATEX_COMMANDS.items():
        text = text.replace(command, replacement)
    text = LATEX_TEXT.sub(r" \1", text)
    for _ in range(MAX_NESTED_FRACTIONS):
        text, powers = LATEX_POWER.subn(r"**(\1)", text)
        text, fractions = LATEX_FRACTION.subn(r"((\1)/(\2))", text)
        if not powers and not fractions:
            break
    boxes = LATEX_BOXED.findall(text)
    return str(boxes[-1]) if boxes else text


MAX_DIGITS = 100
"""Maximum number of characters of one number."""

TOKEN = re.compile(
    r"""\s*(?:
      (?P<mixed>[0-9]+\s+[0-9]+/[0-9]+)(?![0-9.])
    | (?P<number>
        (?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)
        (?:[eE][-+]?[0-9]{1,3}(?![0-9]))?
      )
    | (?P<operator>\*\*|//|[-+*/%()])
    )""",
    re.VERBOSE,
)
UNIT = r"(?:[^\W\d_]|°)+(?:\*\*\(?-?[0-9]\)?)?"
UNITS = re.compile(rf"{UNIT}(?:[ /*.-]+{UNIT}){{0,3}}")


class EvaluationError(ValueError):
    """The text is not arithmetic, has no value, or exceeds a limit."""


def tokenize(expression: str) -> list[str]:
    """Split an expression into numbers and operators. Up to four trailing words are a unit and are dropped."""
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
"""Maximum nesting depth of parentheses and exponents."""

MAX_BITS = 4096
"""Maximum size of any intermediate numerator or denominator."""

Operation = tuple[str, Fraction, Fraction]


class Quantity(Struct, frozen=True, kw_only=True):
    """Value of an expression, and its notation.

    percent: the expression ends in a percent sign; `value` is then in hundredths. decimal: at least one number has a
    decimal point or an exponent. ratio: numerator and denominator if the expression is a single fraction of whole
    numbers in lowest terms. finished: the expression is a number, a mixed number or such a fraction.
    """

    value: Fraction
    percent: bool
    decimal: bool
    ratio: tuple[int, int] | None
    finished: bool


def evaluate(expression: str) -> Quantity:
    """Evaluate an expression of decimals, mixed numbers, thousands separators, percents, parentheses, + - * / // % **.

    Trailing words are a unit and are ignored: `42 apples`, `3 m/s`. A percent sign before a number or a parenthesis is
    the modulo operator, otherwise it means hundredths. `**` is right-associative, binds tighter than a sign before it,
    and takes whole exponents. Raises EvaluationError.
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
    _, numerator, denominator = operations[0]
    if numerator.denominator != 1 or denominator.denominator != 1 or denominator < 2:
        return None
    if gcd(int(numerator), int(denominator)) != 1:
        return None
    return int(numerator), int(denominator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise EvaluationError("a number is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > MAX_BITS:
        raise EvaluationError("an exponent is not whole, or is too large")
    return Fraction(base ** int(exponent))


OPERATORS: Mapping[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod,
}  # fmt: skip


class _Parser:
    """Recursive-descent parser: sum, product, signed, power, atom."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self.operations: list[Operation] = []
        self.decimal = False
        self.percent_last = False

    @property
    def next(self) -> str | None:
        """The next token, which is not consumed; None at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise EvaluationError("the expression is incomplete")
        self._position += 1
        self.percent_last = False
        return token

    def _apply(self, sign: str, left: Fraction, right: Fraction) -> Fraction:
        self.operations.append((sign, left, right))
        return _bounded(_power(left, right) if sign == "**" else Fraction(OPERATORS[sign](left, right)))

    def sum(self, depth: int) -> Fraction:
        """Parse and compute a sum. depth: number of enclosing parentheses and signs."""
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
        self.decimal = self.decimal or any(character in token for character in ".eE")
        return sum((Fraction(part) for part in token.replace(",", "").split()), Fraction(0))

    def _percent(self) -> bool:
        following = self._tokens[self._position + 1] if self._position + 1 < len(self._tokens) else ")"
        if self.next != "%" or following == "(" or following[0].isdigit() or following[0] == ".":
            return False
        self._take()
        self.percent_last = True
        return True
