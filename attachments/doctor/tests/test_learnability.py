"""The estimate of what RL can learn from a dataset: by completions that are correct and wrong."""

from __future__ import annotations

import pytest

from attachments.doctor.completions import learnability
from protocols.rollout import GroupOutcome, RolloutGroup, ScoredGroup
from tests.training_run.records.display_examples import completion, prompt


def judged(correct: int, of: int) -> GroupOutcome:
    """A group of which so many completions are correct."""
    verdicts = tuple(number < correct for number in range(of))
    group = RolloutGroup(prompt=prompt(), completions=tuple(completion(text="4") for _ in verdicts))
    return ScoredGroup(group=group, rewards=tuple(map(float, verdicts)), parts={}, correct=verdicts)


@pytest.mark.parametrize(
    ("groups", "expected", "advice"),
    [
        ([(0, 8)] * 31 + [(1, 8)], "pass@1 0.00, pass@8 0.03 of 32 problems", "warm up first"),
        ([(0, 8)] * 12 + [(5, 8)] * 20, "pass@1 0.39, pass@8 0.62 of 32 problems", "RL can help"),
        ([(8, 8)] * 31 + [(7, 8)], "pass@1 1.00, pass@8 1.00 of 32 problems", "nearly solved"),
        ([(0, 8)] * 16 + [(8, 8)] * 16, "pass@1 0.50, pass@8 0.50 of 32 problems", "always or never"),
        ([(1, 4), (2, 8), (3, 8), (0, 8)], "pass@1 0.22, pass@4 0.68 of 4 problems", "RL can help"),
    ],
)
def test_the_advice_follows_from_pass_at_one_and_at_k(
    groups: list[tuple[int, int]], expected: str, advice: str
) -> None:
    """k is the size of the smallest group, and at most 8."""
    text = learnability([judged(*group) for group in groups], batch_size=16)
    assert text.startswith(f"{expected}: ")
    assert advice in text


def test_a_larger_batch_finds_rare_successes() -> None:
    """One solved problem in 32 is one group of a batch of 32, and half a group of a batch of 16."""
    outcomes = [judged(*group) for group in [(0, 8)] * 31 + [(1, 8)]]
    assert "RL can help" in learnability(outcomes, batch_size=32)


def test_completions_that_nothing_judges_have_no_estimate() -> None:
    """Nor have fewer than four problems."""
    unjudged = ScoredGroup(
        group=RolloutGroup(prompt=prompt(), completions=(completion(text="4"),)), rewards=(1.0,), parts={}
    )
    assert learnability([unjudged] * 8, batch_size=16) == ""
    assert learnability([judged(1, 8)] * 3, batch_size=16) == ""
    assert learnability([judged(1, 1)] * 8, batch_size=16) == ""
