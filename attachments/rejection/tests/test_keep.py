"""Which completions become demonstrations."""

from __future__ import annotations

import pytest

from attachments.rejection.sample import conditions, kept
from protocols.errors import ProfileError
from protocols.evaluation import Grade
from protocols.prompt import Problem
from protocols.sampling import FinishReason
from tests.training_run.records.display_examples import completion
from training_run.evaluation.accuracy import Judged, Outcome


def judged(text: str, reward: float, *, finish: FinishReason = "stop") -> Judged:
    """A completion; rewards of at least 1 are correct."""
    return Judged(
        completion=completion(text=text, finish=finish),
        grade=Grade(correct=reward >= 1, reward=reward, parts={"format": reward / 2}),
    )


def outcome(*completions: Judged) -> Outcome:
    """The first is the greedy one."""
    return Outcome(problem=Problem(prompt="?"), greedy=completions[0], samples=completions[1:])


SOME = outcome(
    judged("a", 0.5), judged("b", 2.0), judged("c", 1.0), judged("b", 2.0), judged("d", 3.0, finish="length")
)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("reward >= 1", ["b", "c"]), ("reward > 1", ["b"]), ("correct == 1 and reward < 2", ["c"]),
        ("correct == 0", ["a"]), ("format <= 0.5", ["c", "a"]), ("reward != 1", ["b", "a"]), ("reward >= 1e1", []),
    ],
)  # fmt: skip
def test_completions_that_fulfil_all_conditions_are_kept_the_best_first(text: str, texts: list[str]) -> None:
    """Each text once, and never a truncated one."""
    assert [one.completion.text for one in kept(SOME, conditions(text), limit=0)] == texts


def test_at_most_so_many_completions_of_a_problem_are_kept() -> None:
    """The best one by default."""
    assert [one.completion.text for one in kept(SOME, conditions("reward >= 0"), limit=1)] == ["b"]


def test_a_completion_without_the_value_is_not_kept() -> None:
    """A reward that failed, or a completion that nothing judges."""
    found = outcome(Judged(completion=completion(text="a", finish="stop"), grade=Grade(correct=None)))
    assert kept(found, conditions("reward >= 0"), limit=0) == []
    assert kept(found, conditions("correct == 0"), limit=0) == []


@pytest.mark.parametrize("text", ["", "reward", "reward >= one", "reward >= 1 or correct == 1", "__import__('os')"])
def test_other_conditions_are_refused(text: str) -> None:
    """They are read, and never executed."""
    with pytest.raises(ProfileError, match="--keep"):
        conditions(text)
