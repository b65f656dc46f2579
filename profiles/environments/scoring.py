"""Scoring of texts: the format of a completion, the value of a number, and the selected option.

Uses only the standard library, because environments run without Clotho. For the problems that are part of Clotho the
results equal those of the built-in rewards `format`, `math_eval` and `choice_correctness`. Unlike `math_eval`, these
functions do not evaluate expressions: an answer is a single number.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER_CHARACTERS = 400
"""A longer answer is neither a number nor an option."""

THINK, THINK_END, ANSWER, ANSWER_END = "<think>", "</think>", "<answer>", "</answer>"
FORM = re.compile(r"\s*<think>(?P<thought>.*)</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)
WORDS = r"(?:\s*[^\W\d_]+(?:[\s/*.-]+[^\W\d_]+){0,3})?"
NUMBER = re.compile(rf"(?P<signs>[-+\s]*)(?P<digits>(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d*)?|\.\d+){WORDS}")
LETTER = re.compile(r"[(\[]?(?P<letter>[A-Za-z])(?:[)\].:]+(?:\s+(?P<text>\S.*))?)?", re.DOTALL)
OPTION = re.compile(r"(?:^|(?<=[\s(,;]))\(?([A-Z])[).:]\s*")


def answer_text(completion: str) -> str | None:
    """Return the stripped content of the last complete `<answer>` outside of a thought; None if there is none."""
    start = completion.rfind(ANSWER)
    end = completion.find(ANSWER_END, start)
    if start < 0 or end < 0:
        return None
    thought = completion.rfind(THINK, 0, start)
    if thought >= 0 and completion.find(THINK_END, thought, start) < 0:
        return None
    return completion[start + len(ANSWER) : end].strip()


def has_format(completion: str) -> bool:
    """Return True if a completion consists of one thought and one answer, both not blank."""
    if any(completion.count(tag) != 1 for tag in (THINK, THINK_END, ANSWER, ANSWER_END)):
        return False
    match = FORM.fullmatch(completion)
    return match is not None and bool(match["thought"].strip()) and bool(match["answer"].strip())


def number(text: str) -> Fraction | None:
    """Return the number that a text consists of, or that follows its last `=`; None for any other text.

    Leading signs, thousands separators and up to four words after the number (a unit) are allowed.
    """
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    text = text.rpartition("=")[2].strip(" \t\r\n*`$").rstrip(".,;! \t\r\n")
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    value = Fraction(match["digits"].replace(",", ""))
    return -value if match["signs"].count("-") % 2 else value


def integer_answer(completion: str) -> int | None:
    """Return the integer in the `<answer>` of a completion; None if there is none."""
    answer = answer_text(completion)
    value = None if answer is None else number(answer)
    return None if value is None or value.denominator != 1 else int(value)


def options(question: str) -> dict[str, str]:
    """Return the options of a question by letter: `A) 12 B) 74` gives {"A": "12", "B": "74"}."""
    marks = list(OPTION.finditer(question))
    ends = [mark.start() for mark in marks[1:]] + [len(question)]
    return {mark[1]: _normalized(question[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)}


def selected_option(text: str, available: dict[str, str]) -> str | None:
    """Return the letter of the option that a text selects: `B`, `(b)`, `B) 74`, or an option's text; None otherwise."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    same = [letter for letter, option in available.items() if option and option == _normalized(text)]
    if same:
        return same[0] if len(same) == 1 else None
    match = LETTER.fullmatch(text.strip().strip("*`$"))
    if match is None:
        return None
    letter, beside = match["letter"].upper(), _normalized(match["text"] or "")
    of_another = any(beside == option for other, option in available.items() if other != letter and option)
    return None if of_another and beside != available.get(letter) else letter


def is_correct(question: str, reference: str, completion: str) -> bool:
    """Return True if the answer equals the reference: the same option, the same number, or the same text."""
    given = answer_text(completion)
    if given is None:
        return False
    if re.fullmatch(r"[A-Za-z]", reference.strip()):
        return selected_option(given, options(question)) == reference.strip().upper()
    wanted = number(reference)
    return _normalized(given) == _normalized(reference) if wanted is None else number(given) == wanted


def marked_reference(text: str) -> str:
    """Return the answer after the last `####` of a worked solution; the whole text if there is no `####`."""
    return text.rpartition("####")[2].strip()


def ends_with(completion: str, reference: str) -> bool:
    """Return True if the last number in a text equals the reference."""
    found = re.findall(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", completion)
    return bool(found) and number(found[-1]) is not None and number(found[-1]) == number(reference)


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .,;:()[]*`$")
