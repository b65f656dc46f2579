"""The problems: how many there are, whether a reward applies, and whether a correct answer earns it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from attachments.doctor.problems import problem_findings, unparsable_finding
from protocols.errors import RecordsError
from protocols.prompt import Problem
from training_run.profile.data import RewardSection

REWARDS = (RewardSection(name="format", weight=0.2), RewardSection(name="math_eval", correct=True))


def problems(count: int, answer: str = "4", kind: str = "math") -> list[Problem]:
    """Problems with different prompts."""
    return [Problem(prompt=f"{i} + 2?", answer=answer, type=kind) for i in range(count)]


def names(found: Sequence[Problem], rewards: Sequence[RewardSection] = REWARDS, *, batch_size: int = 8) -> list[str]:
    """The names of the findings."""
    return [finding.name for finding in problem_findings(found, rewards, batch_size=batch_size)]


@pytest.mark.parametrize(
    ("count", "batch_size", "expected"), [(1, 1, ["few_problems"]), (7, 16, ["few_problems"]), (8, 64, []), (2, 2, [])]
)
def test_a_dataset_with_few_different_prompts_is_a_finding(count: int, batch_size: int, expected: list[str]) -> None:
    """Repeated problems count once."""
    assert names(problems(count) * 3, batch_size=batch_size) == expected


def test_types_without_a_reward_are_a_finding() -> None:
    """An error if no problem has one; a reward with weight 0 adds nothing."""
    only = (RewardSection(name="math_eval", types=("math",)), RewardSection(name="format", weight=0.0))
    mixed = [*problems(8), *problems(8, kind="chat")]
    (some,) = problem_findings(mixed, only, batch_size=8)
    (every,) = problem_findings(problems(8, kind="chat"), only, batch_size=8)
    assert (some.name, some.severity) == ("no_reward_applies", "warning")
    assert (every.name, every.severity) == ("no_reward_applies", "error")


def test_answers_that_no_reward_can_match_are_a_finding() -> None:
    """A tenth of the problems suffices; the answer of one is shown."""
    text = "about four apples"
    (half,) = problem_findings([*problems(8), *problems(8, text)], REWARDS, batch_size=8)
    assert (half.name, half.severity) == ("answers_without_reward", "warning")
    assert text in half.example
    assert names([*problems(40), *problems(2, text)]) == []


def test_functions_of_the_user_may_accept_any_answer() -> None:
    """What such a function expects is unknown."""
    assert names(problems(8, "four"), (*REWARDS, RewardSection(name="mine.py:reward"))) == []
    assert names(problems(8, "four"), (RewardSection(name="exact"),)) == []


def test_malformed_records_are_counted() -> None:
    """The first one is shown with its place."""
    finding = unparsable_finding(RecordsError("a.jsonl:2: not valid JSON", invalid=5, records=10))
    assert (finding.name, finding.example) == ("dataset_unparsable", "a.jsonl:2: not valid JSON")
    assert finding.fact.startswith("5 of 10 ")
