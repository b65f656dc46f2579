# ruff: noqa: RUF001
"""From the ways people write numbers (Unicode, LaTeX, phrases around them) to plain arithmetic."""

from __future__ import annotations

import re
import unicodedata

LONGEST = 1000
"""Characters of an expression; longer ones are refused unread."""

NESTING = 16
"""Fractions inside fractions that are unfolded."""

SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁻]+")
VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
TEXT = re.compile(r"\\(?:text|mathrm|mbox|mathbf|textbf)\s*\{([^{}]*)\}")
POWER = re.compile(r"\^\s*\{([^{}]*)\}")
BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
PHRASE = re.compile(r"[^\W\d_][^\d=:]{0,80}?(?:\bis\b|\bare\b|:)\s*")

SIGNS = str.maketrans(
    {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "⁄": "/", "∕": "/", "≈": "=", "^": "**"}
    | dict.fromkeys("$€£¥", " ")
)  # fmt: skip

COMMANDS = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\left": "", r"\right": "", r"\times": "*", r"\cdot": "*", r"\div": "/",
    r"\approx": "=", r"^\circ": "°", r"^{\circ}": "°", r"\%": "%", r"\$": "", r"\(": "", r"\)": "", r"\[": "",
    r"\]": "",     "{,}": ",", r"\,": "", r"\!": "", r"\;": " ", r"\:": " ", r"\ ": " ",
}  # fmt: skip


def plain(text: str) -> str | None:
    r"""Return the expression that a text ends in, in plain signs; None where the text is too long.

    `The answer is $\boxed{\frac{1}{2}}$.` gives `((1)/(2))`, `15 + 27 = 42` gives `42`, `3 × 10²` gives `3 * 10**(2)`,
    `1½` gives `1 1/2`; in `... #### 72` the reference follows the marks. Nothing is evaluated.
    """
    if len(text) > LONGEST:
        return None
    text = _latex(_unicode(text))
    text = text.rpartition("####")[2].translate(SIGNS).rpartition("=")[2].strip()
    phrase = PHRASE.match(text)
    text = text[phrase.end() :] if phrase else text
    text = text.lstrip(" \t\r\n*`").rstrip(" \t\r\n*`.,;!")
    return text if len(text) <= LONGEST else None


def _unicode(text: str) -> str:
    text = SUPERSCRIPT.sub(lambda match: f"**({match[0]})", text)
    text = VULGAR_FRACTION.sub(lambda match: f" {match[0]}", text)
    return unicodedata.normalize("NFKC", text)


def _latex(text: str) -> str:
    if "\\" not in text and "{" not in text:
        return text
    for command, meaning in COMMANDS.items():
        text = text.replace(command, meaning)
    text = TEXT.sub(r" \1", text)
    for _ in range(NESTING):
        text, powers = POWER.subn(r"**(\1)", text)
        text, fractions = FRACTION.subn(r"((\1)/(\2))", text)
        if not powers and not fractions:
            break
    boxes = BOXED.findall(text)
    return str(boxes[-1]) if boxes else text
