"""Reward `choice_correctness`: the answer chooses the correct options of a multiple-choice question."""

from __future__ import annotations

import re

from clotho.rewards.answer import answer_text
from clotho.rewards.exact import normalized
from protocols.prompt import AnswerIn, Problem

MAX_CHARACTERS = 2000
"""Longer answers choose no option."""

OPTION_MARKER = re.compile(r"(?:^|(?<=[\s(,;]))\(?([A-Z])[).:]\s*", re.MULTILINE)
PHRASE = r"(?:(?:the\s+)?(?:correct\s+)?(?:options?|choices?|answers?)(?:\s+(?:is|are))?[\s:]*)?"
CHOSEN_LETTER = re.compile(
    rf"{PHRASE}[(\[]?(?P<letter>[a-z])(?:[)\].:]+(?:\s+(?P<text>\S.*))?)?", re.IGNORECASE | re.DOTALL
)
LEADING_PHRASE = re.compile(PHRASE, re.IGNORECASE)
SEPARATOR = re.compile(r" ?(?:[,;/&+]|\band\b) ?(?:and\b ?)?", re.IGNORECASE)
LETTER = re.compile(r"[(\[]?([a-z])[)\].:]?", re.IGNORECASE)


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
    by_text = _with_text(text, offered)
    if by_text:
        return min(by_text) if len(by_text) == 1 else None
    match = CHOSEN_LETTER.fullmatch(_plain(text))
    if match is None:
        return None
    letter, option_text = match["letter"].upper(), _stripped(match["text"] or "")
    contradicted = any(option_text == option for other, option in offered.items() if other != letter and option)
    return None if contradicted and option_text != offered.get(letter) else letter


def several(text: str, offered: dict[str, str]) -> frozenset[str]:
    """Return the letters of a text that chooses several options; empty if it does not.

    `A, C`, `(A) and (C)`, `A; C`, `Answers: A & C`, `A) 12, C) 33` with the texts of these options, and `AC` if both
    letters are offered. A text that equals the text of an option chooses this option. Repeated letters choose nothing.
    """
    if len(text) > MAX_CHARACTERS or _with_text(text, offered):
        return frozenset()
    listed = LEADING_PHRASE.sub("", " ".join(_plain(text).split()), count=1).rstrip(" .")
    if listed.isalpha() and set(listed) <= offered.keys():
        letters = list(listed)
    else:
        parts = [LETTER.fullmatch(part) for part in SEPARATOR.split(listed)]
        letters = [part[1].upper() for part in parts if part] if all(parts) else []
    if letters:
        return frozenset(letters) if len(letters) == len(set(letters)) > 1 else frozenset()
    named = options(listed) if OPTION_MARKER.match(listed) else {}
    same = all(option.removesuffix(" and").rstrip(" ,;") == offered.get(letter) for letter, option in named.items())
    return frozenset(named) if len(named) > 1 and same else frozenset()


def reference_letters(problem: Problem) -> frozenset[str]:
    """Return the letters of the correct options; empty if the reference answer is not a letter or several."""
    letter = choice(problem.answer, {})
    return several(problem.answer, options(problem.prompt)) or frozenset(letter or ())


def reward(problem: Problem, completion: str, *, answer_in: AnswerIn = "tags") -> float | None:
    """Return the share of the reference letters that the answer chooses, and 0.0 if it chooses any other letter.

    A question with one right letter has 1.0 or 0.0. For the reference `A, C`, the answers `A, C`, `C` and `A, B, C`
    have 1.0, 0.5 and 0.0: the rule of multiple-answer questions in GAOKAO (arXiv:2305.12474), with a share instead of
    one half, so that all letters together earn nothing. The result is None if the reference is not a letter or several.
    """
    reference = reference_letters(problem)
    if not reference:
        return None
    answer = answer_text(completion, answer_in)
    if answer is None:
        return 0.0
    offered = options(problem.prompt)
    found = several(answer, offered)
    if not found and (len(reference) == 1 or len(options(answer)) <= 1):
        found = frozenset(choice(answer, offered) or ())
    return len(found) / len(reference) if found <= reference else 0.0


def _with_text(text: str, offered: dict[str, str]) -> set[str]:
    """Return the letters of the options that have this text."""
    return {letter for letter, option in offered.items() if option and option == _stripped(text)}


def _plain(text: str) -> str:
    return text.strip().strip("*`$")


def _stripped(text: str) -> str:
    return normalized(text).strip(" .,;:()[]*`$")
