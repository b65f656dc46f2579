r"""Extraction of the answer from a completion, for each place where models write it (`answer_in`).

| place | the answer |
|---|---|
| `tags` | the text of the last `<answer>...</answer>` |
| `boxed` | the content of the last `\boxed{...}` with balanced braces |
| `hashes` | the rest of the line after the last `####`, the form of GSM8K |
| `last_number` | the last number |
| `text` | the whole text |

Except for `tags`, only the text after the last thought (`<think>...</think>`) is searched. A completion that ends
inside a thought has no answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the contenders of the benchmarks use this module without msgspec
    from protocols.prompt import AnswerIn

THINK, THINK_END = "<think>", "</think>"
ANSWER, ANSWER_END = "<answer>", "</answer>"
HASHES = "####"

PLACES: Mapping[AnswerIn, str] = MappingProxyType(
    {
        "tags": "inside <answer>...</answer>",
        "boxed": r"inside the last \boxed{...}",
        "hashes": "after the last ####",
        "last_number": "as the last number of the text",
        "text": "as the whole text",
    }
)
"""The places, in words."""

BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
"""A box, a backslash with the character that it escapes, or a brace."""

TEXT_ONLY = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
"""A box whose content is text, such as a word or a letter."""

NUMBER = re.compile(
    r"""
      [-\u2212]?\\[dt]?frac\{[-\u2212]?\d+\}\{\d+\}
    | (?<![\w.])[-\u2212]?(?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)(?:\.\d+|/\d+)?(?:\s?\\?%)?
    """,
    re.VERBOSE,
)
"""An integer, a decimal or a fraction, with or without commas between thousands, a sign and a percent sign."""


def answer_text(completion: str, answer_in: AnswerIn = "tags") -> str | None:
    """Return the answer of a completion, stripped; None if it has none. The cost is linear in its length."""
    if answer_in == "tags":
        return _in_tags(completion)
    spoken = after_thoughts(completion)
    return None if spoken is None else _FINDERS[answer_in](spoken)


def with_answer(answer: str, answer_in: AnswerIn) -> str:
    """Return a completion that has this answer in this place."""
    written = {"tags": f"{ANSWER}{answer}{ANSWER_END}", "boxed": f"\\boxed{{{answer}}}", "hashes": f"{HASHES} {answer}"}
    return f"{THINK}x{THINK_END}{written.get(answer_in, answer)}"


def _in_tags(completion: str) -> str | None:
    """Return the text inside the last `<answer>` element; None if there is no complete element.

    An element without a closing tag does not count: the token limit truncated the answer. An element inside an open
    `<think>` does not count either. Do not use `</answer>` as a stop string: stop strings are removed from the text.
    """
    start = completion.rfind(ANSWER)
    end = completion.find(ANSWER_END, start)
    if start < 0 or end < 0:
        return None
    think = completion.rfind(THINK, 0, start)
    if think >= 0 and completion.find(THINK_END, think, start) < 0:
        return None
    return completion[start + len(ANSWER) : end].strip()


def after_thoughts(completion: str) -> str | None:
    """Return the text after the last thought; None if a thought is open at the end."""
    closed = completion.rfind(THINK_END)
    if completion.rfind(THINK) > closed:
        return None
    return completion if closed < 0 else completion[closed + len(THINK_END) :]


def _in_box(text: str) -> str | None:
    """Return the content of the box that closes last, without a command around it; a truncated box is skipped."""
    if (start := text.find("\\")) < 0:
        return None
    opened: list[int] = []  # where the content of a box begins; -1 for another brace
    found: tuple[int, int] | None = None
    for match in BRACES.finditer(text, start):
        token = match[0]
        if token == "{":
            opened.append(-1)
        elif token == "}":
            if opened and (begin := opened.pop()) >= 0:
                found = begin, match.start()
        elif token.endswith("{") and len(token) > 2:
            opened.append(match.end())
    if found is None:
        return None
    content = text[slice(*found)].strip()
    only = TEXT_ONLY.fullmatch(content)
    return only[1].strip() if only else content


def _after_hashes(text: str) -> str | None:
    _, mark, rest = text.rpartition(HASHES)
    line = rest.partition("\n")[0].strip() if mark else ""
    return line or None


def _last_number(text: str) -> str | None:
    numbers = deque(NUMBER.finditer(text), maxlen=1)
    return numbers[0][0] if numbers else None


def _whole(text: str) -> str | None:
    return text.strip() or None


_FINDERS: Mapping[AnswerIn, Callable[[str], str | None]] = MappingProxyType(
    {"boxed": _in_box, "hashes": _after_hashes, "last_number": _last_number, "text": _whole}
)
