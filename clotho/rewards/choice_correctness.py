"""Reward `choice_correctness`: the answer chooses the correct option of a multiple-choice question."""

from __future__ import annotations

import re

from clotho.rewards.answer import answer_text
from clotho.rewards.exact import normalized
from protocols.prompt import Problem

MAX_CHARACTERS = 2000
"""Longer answers choose no option."""

OPTION_MARKER = re.compile(r"(?:^|(?<=[\s(,;]))\(?([A-Z])[).:]\s*", re.MULTILINE)
CHOSEN_LETTER = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)(?:\s+is)?[\s:]*)?"
    r"[(\[]?(?P<letter>[a-z])(?:[)\].:]+(?:\s+(?P<text>\S.*))?)?",
    re.IGNORECASE | re.DOTALL,
)


def options(prompt: str) -> dict[str, str]:
    """Return the options of a prompt by letter: `A) 12 B) 74` gives {"A": "12", "B": "74"}. Also `(A)`, `A.`, `A:`."""
    markers = list(OPTION_MARKER.finditer(prompt))
    starts = [marker.start() for marker in markers]
    return {
        marker[1]: _stripped(prompt[marker.end() : end])
        for marker, end in zip(markers, [*starts[1:], len(prompt)], strict=False)
    }


def choice(text: str, offered: dict[str, str]) -> str | None:
    """Return the letter that a text chooses: `B`, `(b)`, `B.`, `option B`, `B) 74`, or the text of the option.

    Returns None if the text chooses no option or several, for example `A or B`, or one letter with another option's
    text.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    by_text = {letter for letter, option in offered.items() if option and option == _stripped(text)}
    if by_text:
        return min(by_text) if len(by_text) == 1 else None
    match = CHOSEN_LETTER.fullmatch(text.strip().strip("*`$"))
    if match is None:
        return None
    letter, option_text = match["letter"].upper(), _stripped(match["text"] or "")
    contradicted = any(option_text == option for other, option in offered.items() if other != letter and option)
    return None if contradicted and option_text != offered.get(letter) else letter


def reward(problem: Problem, completion: str) -> float | None:
    """Return 1.0 if the answer chooses the reference option, otherwise 0.0; None if the reference is not a letter."""
    reference = choice(problem.answer, {})
    if reference is None:
        return None
    answer = answer_text(completion)
    return float(answer is not None and choice(answer, options(problem.prompt)) == reference)


def _stripped(text: str) -> str:
    return normalized(text).strip(" .,;:()[]*`$")
