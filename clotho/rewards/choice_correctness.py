"""The reward for choosing the right option of a multiple-choice question."""

from __future__ import annotations

import re

from clotho.rewards.answer import answer_text
from clotho.rewards.exact import normalized
from protocols.prompt import Problem

LONGEST = 2000
"""Characters of an answer that are looked at; longer ones choose nothing."""

MARKER = re.compile(r"(?:^|(?<=[\s(,;]))\(?([A-Z])[).:]\s*", re.MULTILINE)
LETTER = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)(?:\s+is)?[\s:]*)?"
    r"[(\[]?(?P<letter>[a-z])(?:[)\].:]+(?:\s+(?P<text>\S.*))?)?",
    re.IGNORECASE | re.DOTALL,
)


def options(prompt: str) -> dict[str, str]:
    """Return the options of a prompt by letter: `A) 12 B) 74` gives {"A": "12", "B": "74"}; also `(A)`, `A.`, `A:`."""
    marks = list(MARKER.finditer(prompt))
    starts = [mark.start() for mark in marks]
    return {
        mark[1]: _bare(prompt[mark.end() : end]) for mark, end in zip(marks, [*starts[1:], len(prompt)], strict=False)
    }


def choice(text: str, offered: dict[str, str]) -> str | None:
    """Return the letter that a text chooses, as `B`, `(b)`, `B.`, `option B`, `B) 74` or by an option's own text.

    None where it chooses nothing or several options: `A or B`, or the letter of one beside the text of another.
    """
    if len(text) > LONGEST:
        return None
    by_text = {letter for letter, option in offered.items() if option and option == _bare(text)}
    if by_text:
        return min(by_text) if len(by_text) == 1 else None
    match = LETTER.fullmatch(text.strip().strip("*`$"))
    if match is None:
        return None
    letter, beside = match["letter"].upper(), _bare(match["text"] or "")
    contradicted = any(beside == option for other, option in offered.items() if other != letter and option)
    return None if contradicted and beside != offered.get(letter) else letter


def reward(problem: Problem, completion: str) -> float | None:
    """Return 1.0 for the reference's option, otherwise 0.0; None where the reference is not the letter of an option."""
    wanted = choice(problem.answer, {})
    if wanted is None:
        return None
    answer = answer_text(completion)
    return float(answer is not None and choice(answer, options(problem.prompt)) == wanted)


def _bare(text: str) -> str:
    return normalized(text).strip(" .,;:()[]*`$")
