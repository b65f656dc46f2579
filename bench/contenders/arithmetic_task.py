"""The task of profile local-m3 for other trainers: its rewards and their rules.

The rules equal those of `clotho.rewards` for problems whose answers are whole numbers or letters, which holds for all
problems of this task.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.contenders.training_task import TrainingTask
from clotho.rewards.answer import ANSWER, ANSWER_END, THINK, THINK_END, answer_text

POLICY = Path(__file__).resolve().parents[2] / "profiles" / "embedded"
FORMAT_WEIGHT, ANSWER_WEIGHT = 0.2, 1.0

FORMAT = re.compile(rf"\s*{THINK}(?P<thought>.*){THINK_END}\s*{ANSWER}(?P<answer>.*){ANSWER_END}\s*", re.DOTALL)
NUMBER = re.compile(r"[+-]?[0-9]+")
LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")


def has_format(completion: str, _: str = "") -> float:
    """1.0 for exactly one non-empty thought followed by one non-empty answer, otherwise 0.0."""
    match = FORMAT.fullmatch(completion)
    if match is None or any(completion.count(tag) != 1 for tag in (THINK, THINK_END, ANSWER, ANSWER_END)):
        return 0.0
    return float(bool(match["thought"].strip() and match["answer"].strip()))


def is_correct(completion: str, expected: str) -> float:
    """1.0 if the answer equals the number or the letter of the reference, otherwise 0.0."""
    found = answer_text(completion)
    if found is None:
        return 0.0
    if NUMBER.fullmatch(expected):
        return float(bool(NUMBER.fullmatch(found)) and int(found) == int(expected))
    letter = LETTER.fullmatch(found)
    return float(letter is not None and letter[1].upper() == expected)


ARITHMETIC = TrainingTask(
    model="embedded",
    directory=POLICY,
    problems=POLICY,
    system="",
    max_tokens=96,
    rank=16,
    scale=2.0,
    rewards=((FORMAT_WEIGHT, has_format), (ANSWER_WEIGHT, is_correct)),
    correct=is_correct,
)
"""`model` is the name of the embedded policy in `bench.contenders.shapes`, which needs MLX to be imported."""
