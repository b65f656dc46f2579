"""What the environments find right and well formed, against the built-in rewards of Clotho."""

from __future__ import annotations

import json
from random import Random

import pytest

from clotho.rewards import choice_correctness, math_eval, tag_format
from profiles.environments import scoring
from protocols.prompt import Problem
from tests.environments.scripts import EMBEDDED

LINES = [json.loads(line) for line in (EMBEDDED / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
PROBLEMS = [Problem(prompt=line["prompt"], answer=line["answer"], type=line["type"]) for line in LINES]

PIECES = (
    *"0123456789",
    *"ABCD",
    "+",
    "-",
    "*",
    "=",
    ",",
    ".",
    " ",
    ")",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
)
"""What the embedded policy writes, piece by piece."""


def builtin_verdict(problem: Problem, completion: str) -> bool:
    """Judge by the reward that applies to a problem; exactly one of the two does."""
    verdicts = [reward(problem, completion) for reward in (math_eval.reward, choice_correctness.reward)]
    (verdict,) = [verdict for verdict in verdicts if verdict is not None]
    return verdict == 1.0


def texts(problem: Problem, rng: Random) -> list[str]:
    """Write completions of one problem: right, wrong, and broken in the ways in which a policy breaks them."""
    value = problem.answer
    noise = "".join(rng.choices(PIECES, k=rng.randint(0, 6)))
    word = rng.choice(problem.prompt.split())
    written = [
        value, f" {value}. ", f"0{value}", f"{value}.0", f"={value}", f"4+5={value}", f"{value} coins", f"-{value}",
        f"+{value}", f"--{value}", f"{value}B", f"B{value}", f"{value})", f"${value}", f"{value},", f"{value}+0",
        f"1,{value}", f"{value} {value}", "", noise, noise + value, value + noise, rng.choice("ABCDabcd"), word,
        f"{value.lower()}) {word}",
    ]  # fmt: skip
    framed = [f"<think>{noise}</think><answer>{one}</answer>" for one in written]
    return [*framed, *written, *(text.replace(rng.choice(PIECES), "", 1) for text in framed), noise * 3]


@pytest.mark.parametrize("problem", PROBLEMS[:128], ids=str)
def test_an_environment_and_the_built_in_rewards_judge_alike(problem: Problem) -> None:
    """For the embedded problems, and texts made of what the embedded policy writes, both give the same verdicts."""
    rng = Random(problem.prompt)
    for text in texts(problem, rng):
        found = scoring.is_correct(problem.prompt, problem.answer, text)
        assert found == builtin_verdict(problem, text), text
        assert scoring.well_formed(text) == (tag_format.reward(problem, text) == 1.0), text


def test_random_texts_are_judged_alike() -> None:
    """Nor do they differ on texts that nobody thought of."""
    rng = Random(0)
    for _ in range(20_000):
        problem = rng.choice(PROBLEMS)
        answer = "".join(rng.choices(PIECES, k=rng.randint(1, 4)))
        text = rng.choice(
            [f"<think>1</think><answer>{answer}</answer>", "".join(rng.choices(PIECES, k=rng.randint(1, 12)))]
        )
        assert scoring.is_correct(problem.prompt, problem.answer, text) == builtin_verdict(problem, text), (
            problem,
            text,
        )
        assert scoring.well_formed(text) == (tag_format.reward(problem, text) == 1.0), text


@pytest.mark.parametrize("text", ["So the answer is\n#### 1,234", "#### 1234", "1234", "a #### 5\n#### $1,234"])
def test_the_reference_of_a_worked_solution_follows_the_last_mark(text: str) -> None:
    """As in GSM8K; a plain answer is its own reference."""
    assert scoring.number(scoring.marked_reference(text)) == 1234


@pytest.mark.parametrize(
    ("completion", "right"),
    [("It costs 3 times 14, that is 42 dollars.", True), ("42 or 43", False), ("no number", False), ("-42", False)],
)
def test_an_untagged_text_may_be_judged_by_its_last_number(completion: str, right: bool) -> None:
    """Whatever stands before it."""
    assert scoring.ends_with(completion, "42") is right


def test_a_long_answer_is_not_read() -> None:
    """The cost of a judgement is bounded."""
    assert scoring.number("9" * 100_000) is None
    assert scoring.chosen("A" * 100_000, {"A": "1"}) is None
