"""Batches in a row from which nothing can be learned: which ones count, and at which number the run must end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protocols.rollout import Discarded, DiscardReason, GroupOutcome
from tests.actors.actor_helpers import prompt
from tests.actors.learner_harness import trainable_group
from tests.training_run.records.display_examples import completion
from training_run.groups.batch_collector import FruitlessBatches


def ended(reason: DiscardReason) -> Discarded:
    """A group that ended for this reason."""
    detail = "raised KeyError: 'nope'" if reason == "reward_error" else ""
    rewards = () if reason == "reward_error" else (0.0, 0.0)
    made = (completion(text="4"), completion(text="5"))
    return Discarded(prompt=prompt(0), reason=reason, detail=detail, completions=made, rewards=rewards)


FAILED, EQUAL, STALE = ended("reward_error"), ended("zero_variance"), ended("stale")
TRAINED: GroupOutcome = trainable_group(0)


def causes(*batches: Sequence[GroupOutcome], failed: int = 3, equal: int = 4) -> list[str]:
    """The key of the limit that each batch reaches, or an empty text."""
    counted = FruitlessBatches(max_failed=failed, max_equal=equal, batch_size=2)
    found = [counted.add(batch) for batch in batches]
    keys = ("learner.max_failed_batches", "learner.max_equal_batches")
    return [next((key for key in keys if key in cause), "") for cause in found]


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([[FAILED, FAILED]] * 4, ["", "", "learner.max_failed_batches", ""]),
        ([[EQUAL, EQUAL]] * 4, ["", "", "", "learner.max_equal_batches"]),
        ([[EQUAL, FAILED]] * 4, ["", "", "", "learner.max_equal_batches"]),
        ([[FAILED, FAILED]] * 2 + [[TRAINED, FAILED]] + [[FAILED, FAILED]] * 2, [""] * 5),
        ([[FAILED, FAILED]] * 2 + [[EQUAL, FAILED]] + [[FAILED, FAILED]] * 2, [""] * 5),
        ([[EQUAL, STALE]] * 5, [""] * 5),
        ([[]] * 5, [""] * 5),
    ],
    ids=["failed", "equal", "failed and equal", "one trained", "one equal", "one stale", "empty"],
)
def test_a_series_of_batches_reaches_a_limit_once(batches: list[list[GroupOutcome]], expected: list[str]) -> None:
    """Every group must have failed, or every group must have equal rewards or have failed."""
    assert causes(*batches) == expected


def test_a_limit_of_0_is_none() -> None:
    """The run goes on."""
    assert causes(*[[FAILED, FAILED]] * 9, failed=0) == causes(*[[EQUAL, EQUAL]] * 9, equal=0) == [""] * 9


def test_a_cause_has_an_example() -> None:
    """The exception of the reward, or a completion with its reward."""
    counted = FruitlessBatches(max_failed=1, max_equal=1, batch_size=2)
    assert "KeyError: 'nope'" in counted.add([FAILED])
    assert "the reward 0 for " in counted.add([EQUAL])


def test_groups_of_environments_count_as_batches() -> None:
    """As many groups in a row as a batch has; a group to train on ends the series."""
    counted = FruitlessBatches(max_failed=3, max_equal=2, batch_size=2)
    groups = [EQUAL, EQUAL, EQUAL, TRAINED, EQUAL, EQUAL, EQUAL, EQUAL]
    assert [bool(counted.add_one(group)) for group in groups] == [False] * 7 + [True]
