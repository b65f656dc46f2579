"""The numbers and signs of written arithmetic."""

from __future__ import annotations

import re

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
