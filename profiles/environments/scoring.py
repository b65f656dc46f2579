"""How texts are judged: the form of a completion, the value of a number, the option that is chosen.

Nothing but the standard library: the environments run where Clotho is not installed. For what a policy writes about
the problems that ship with Clotho the verdicts are those of the built-in rewards `format`, `math_eval` and
`choice_correctness`; unlike `math_eval`, nothing here evaluates an expression: an answer is one written number.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 400
"""Characters of an answer that are looked at; longer ones are no number and no option."""

THINK, THINK_END, ANSWER, ANSWER_END = "<think>", "</think>", "<answer>", "</answer>"
FORM = re.compile(r"\s*<think>(?P<thought>.*)</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)
WORDS = r"(?:\s*[^\W\d_]+(?:[\s/*.-]+[^\W\d_]+){0,3})?"
NUMBER = re.compile(rf"(?P<signs>[-+\s]*)(?P<digits>(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d*)?|\.\d+){WORDS}")
LETTER = re.compile(r"[(\[]?(?P<letter>[A-Za-z])(?:[)\].:]+(?:\s+(?P<text>\S.*))?)?", re.DOTALL)
OPTION = re.compile(r"(?:^|(?<=[\s(,;]))\(?([A-Z])[).:]\s*")


def answer_text(completion: str) -> str | None:
    """Return what stands inside the last closed `<answer>`, stripped; None where there is none outside a thought."""
    start = completion.rfind(ANSWER)
    end = completion.find(ANSWER_END, start)
    if start < 0 or end < 0:
        return None
    thought = completion.rfind(THINK, 0, start)
    if thought >= 0 and completion.find(THINK_END, thought, start) < 0:
        return None
    return completion[start + len(ANSWER) : end].strip()


def well_formed(completion: str) -> bool:
    """Say whether a completion is one thought and then one answer, neither of them blank, and nothing else."""
    if any(completion.count(tag) != 1 for tag in (THINK, THINK_END, ANSWER, ANSWER_END)):
        return False
    match = FORM.fullmatch(completion)
    return match is not None and bool(match["thought"].strip()) and bool(match["answer"].strip())


def number(text: str) -> Fraction | None:
    """Return the one number that a text is, or that follows its last `=`; None where it is anything else.

    Signs before it and up to four words after it (a unit) are allowed, and so are thousands separators.
    """
    if len(text) > LONGEST:
        return None
    text = text.rpartition("=")[2].strip(" \t\r\n*`$").rstrip(".,;! \t\r\n")
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    value = Fraction(match["digits"].replace(",", ""))
    return -value if match["signs"].count("-") % 2 else value


def whole_number(completion: str) -> int | None:
    """Return the whole number in the `<answer>` of a completion; None where there is none."""
    answer = answer_text(completion)
    value = None if answer is None else number(answer)
    return None if value is None or value.denominator != 1 else int(value)


def options(question: str) -> dict[str, str]:
    """Return the options of a question by letter: `A) 12 B) 74` gives {"A": "12", "B": "74"}."""
    marks = list(OPTION.finditer(question))
    ends = [mark.start() for mark in marks[1:]] + [len(question)]
    return {mark[1]: _bare(question[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)}


def chosen(text: str, offered: dict[str, str]) -> str | None:
    """Return the letter that a text chooses: as `B`, `(b)`, `B) 74`, or by an option's own text; None if no one."""
    if len(text) > LONGEST:
        return None
    same = [letter for letter, option in offered.items() if option and option == _bare(text)]
    if same:
        return same[0] if len(same) == 1 else None
    match = LETTER.fullmatch(text.strip().strip("*`$"))
    if match is None:
        return None
    letter, beside = match["letter"].upper(), _bare(match["text"] or "")
    of_another = any(beside == option for other, option in offered.items() if other != letter and option)
    return None if of_another and beside != offered.get(letter) else letter


def is_correct(question: str, reference: str, completion: str) -> bool:
    """Say whether the answer of a completion is the reference: the same option, the same number, else the same text."""
    given = answer_text(completion)
    if given is None:
        return False
    if re.fullmatch(r"[A-Za-z]", reference.strip()):
        return chosen(given, options(question)) == reference.strip().upper()
    wanted = number(reference)
    return _bare(given) == _bare(reference) if wanted is None else number(given) == wanted


def marked_reference(text: str) -> str:
    """Return the answer that follows the last `####` of a worked solution; the whole text where there is no mark."""
    return text.rpartition("####")[2].strip()


def ends_with(completion: str, reference: str) -> bool:
    """Say whether the last number that is written in a text is the reference."""
    found = re.findall(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", completion)
    return bool(found) and number(found[-1]) is not None and number(found[-1]) == number(reference)


def _bare(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .,;:()[]*`$")
