"""Scoring in environments, compared with the built-in rewards of Clotho."""

from __future__ import annotations

import json
from random import Random

import pytest

from attachments.graders import choice_correctness, math_eval
from clotho.rewards import tag_format
from profiles.environments import scoring
from protocols.prompt import Problem
from tests.environments.paths import EMBEDDED

LINES = [json.loads(line) for line in (EMBEDDED / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
PROBLEMS = [Problem(prompt=line["prompt"], answer=line["answer"], type=line["type"]) for line in LINES]

TOKENS = (
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
"""Tokens that the embedded policy generates."""


def builtin_verdict(problem: Problem, completion: str) -> bool:
    """Return the result of the reward that applies to a problem; exactly one of the two applies."""
    verdicts = [reward(problem, completion) for reward in (math_eval.reward, choice_correctness.reward)]
    (verdict,) = [verdict for verdict in verdicts if verdict is not None]
    return verdict == 1.0


def texts(problem: Problem, rng: Random) -> list[str]:
    """Return completions of one problem: correct, wrong, and malformed as by a policy."""
    value = problem.answer
    noise = "".join(rng.choices(TOKENS, k=rng.randint(0, 6)))
    word = rng.choice(problem.prompt.split())
    written = [
        value, f" {value}. ", f"0{value}", f"{value}.0", f"={value}", f"4+5={value}", f"{value} coins", f"-{value}",
        f"+{value}", f"--{value}", f"{value}B", f"B{value}", f"{value})", f"${value}", f"{value},", f"{value}+0",
        f"1,{value}", f"{value} {value}", "", noise, noise + value, value + noise, rng.choice("ABCDabcd"), word,
        f"{value.lower()}) {word}",
    ]  # fmt: skip
    framed = [f"<think>{noise}</think><answer>{one}</answer>" for one in written]
    return [*framed, *written, *(text.replace(rng.choice(TOKENS), "", 1) for text in framed), noise * 3]


@pytest.mark.parametrize("kind", sorted({problem.type for problem in PROBLEMS}))
def test_environments_and_built_in_rewards_score_problems_equally(kind: str) -> None:
    """Problems of every type. The texts consist of tokens that the embedded policy generates."""
    for problem in [problem for problem in PROBLEMS if problem.type == kind][:16]:
        for text in texts(problem, Random(problem.prompt)):
            found = scoring.is_correct(problem.prompt, problem.answer, text)
            assert found == builtin_verdict(problem, text), (problem, text)
            assert scoring.has_format(text) == (tag_format.reward(problem, text) == 1.0), (problem, text)


def test_environments_and_built_in_rewards_score_random_texts_equally() -> None:
    """20,000 random texts."""
    rng = Random(0)
    for _ in range(20_000):
        problem = rng.choice(PROBLEMS)
        answer = "".join(rng.choices(TOKENS, k=rng.randint(1, 4)))
        text = rng.choice(
            [f"<think>1</think><answer>{answer}</answer>", "".join(rng.choices(TOKENS, k=rng.randint(1, 12)))]
        )
        assert scoring.is_correct(problem.prompt, problem.answer, text) == builtin_verdict(problem, text), (
            problem,
            text,
        )
        assert scoring.has_format(text) == (tag_format.reward(problem, text) == 1.0), text


@pytest.mark.parametrize("text", ["So the answer is\n#### 1,234", "#### 1234", "1234", "a #### 5\n#### $1,234"])
def test_the_reference_of_a_worked_solution_follows_the_last_hash_marks(text: str) -> None:
    """The format of GSM8K; an answer without a mark is the reference."""
    assert scoring.number(scoring.marked_reference(text)) == 1234


@pytest.mark.parametrize(
    ("completion", "right"),
    [("It costs 3 times 14, that is 42 dollars.", True), ("42 or 43", False), ("no number", False), ("-42", False)],
)
def test_a_text_without_tags_can_be_scored_by_its_last_number(completion: str, right: bool) -> None:
    """The text before the number is ignored."""
    assert scoring.ends_with(completion, "42") is right


def test_a_long_answer_is_rejected() -> None:
    """The cost of scoring is limited."""
    assert scoring.number("9" * 100_000) is None
    assert scoring.selected_option("A" * 100_000, {"A": "1"}) is None
