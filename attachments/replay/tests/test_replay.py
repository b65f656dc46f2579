"""The replay buffer: bounded, never too old, fair by its stated distribution, and the same again after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import convert

from attachments.replay.replay import ReplayBuffer
from attachments.replay.sections import BufferedReplay
from protocols.rollout import ScoredGroup
from protocols.step import TrainedGroup
from tests.training.policies_and_groups import scored_group


def learned(group_id: int, advantage: float = 1.0) -> TrainedGroup:
    """A group whose advantages have this mean size."""
    scored = scored_group([[1], [2]], [0.0, 1.0], group_id=group_id)
    return TrainedGroup(scored=scored, advantages=(-2.0 * advantage, 0.0))


def section(**settings: Any) -> BufferedReplay:
    """Settings of a buffer with room for a hundred."""
    sampling = {"type": settings.pop("sampling", "uniform")}
    sampling |= {name: settings.pop(name) for name in ("priority", "exponent") if name in settings}
    return convert({"type": "buffer", "capacity": 100, "sampling": sampling, **settings}, BufferedReplay)


def buffer(advantages: Sequence[float], *, seed: int = 0, **settings: Any) -> ReplayBuffer:
    """A buffer that took one group of each size of advantage, the first at version 1, the next at version 2 ..."""
    made = ReplayBuffer(section(**settings), seed=seed)
    for index, advantage in enumerate(advantages):
        made.add([learned(index, advantage)], version=index + 1)
    return made


def ids(groups: Sequence[ScoredGroup]) -> list[int]:
    """Which groups these are."""
    return [group.group.prompt.group_id for group in groups]


def test_it_holds_the_newest_up_to_its_capacity() -> None:
    """The oldest go first."""
    kept = buffer([1.0] * 7, capacity=3, groups=5)
    assert [one.version for one in kept.groups()] == [5, 6, 7]
    assert ids(kept.sample(version=7, step=0)) == [4, 5, 6]


def test_what_is_too_old_leaves_and_is_never_handed_out() -> None:
    """At age `max_age` a group is still good; a version later it is gone."""
    kept = buffer([1.0] * 4, groups=4, max_age=3)
    assert ids(kept.sample(version=4, step=0)) == [0, 1, 2, 3]
    assert ids(kept.sample(version=6, step=0)) == [2, 3]
    assert len(kept) == 2
    kept.add([learned(9)], version=8)
    assert [one.scored.group.prompt.group_id for one in kept.groups()] == [9]


def test_a_buffer_that_is_cleared_is_empty() -> None:
    """After a rollback, no group of a discarded version is drawn."""
    kept = buffer([1.0] * 2, groups=2)
    kept.clear()
    assert (len(kept), kept.sample(version=2, step=0)) == (0, ())


def test_a_draw_is_of_different_groups_and_takes_nothing_out() -> None:
    """Fewer where there are fewer, the oldest first."""
    kept = buffer([1.0] * 10, groups=4, sampling="weighted")
    for step in range(20):
        sampled = ids(kept.sample(version=10, step=step))
        assert len(set(sampled)) == 4
        assert sampled == sorted(sampled)
    assert len(kept) == 10
    assert ids(buffer([1.0] * 2, groups=4).sample(version=2, step=0)) == [0, 1]


def test_by_priority_the_most_are_drawn_and_of_equals_the_newest() -> None:
    """Priority is the mean size of the advantages, or how recent a group is."""
    kept = buffer([3.0, 1.0, 2.0, 1.0, 1.0], groups=3, sampling="priority")
    assert ids(kept.sample(version=5, step=0)) == [0, 2, 4]
    recent = buffer([3.0, 1.0, 2.0, 1.0, 1.0], groups=3, sampling="priority", priority="recency")
    assert ids(recent.sample(version=5, step=0)) == [2, 3, 4]


@pytest.mark.parametrize("sampling", ["uniform", "weighted"])
def test_a_draw_depends_on_seed_and_step_and_not_on_the_draws_before(sampling: str) -> None:
    """So that a resumed run draws what the uninterrupted one did, from what its checkpoint kept."""
    first = buffer([1.0] * 30, groups=5, sampling=sampling)
    for step in range(9):
        first.sample(version=30, step=step)
    second = ReplayBuffer(section(groups=5, sampling=sampling), seed=0, kept=first.groups())
    sampled = ids(first.sample(version=30, step=9))
    assert ids(second.sample(version=30, step=9)) == sampled
    assert ids(first.sample(version=30, step=10)) != sampled
    assert ids(buffer([1.0] * 30, groups=5, sampling=sampling, seed=1).sample(version=30, step=9)) != sampled


def test_a_smaller_buffer_resumed_from_a_larger_one_keeps_the_newest() -> None:
    """The capacity is that of the settings, not of what was kept."""
    kept = buffer([1.0] * 6).groups()
    resumed = ReplayBuffer(BufferedReplay(capacity=2, max_age=1), seed=0, kept=kept)
    assert resumed.groups() == kept[-2:]
    assert ids(resumed.sample(version=7, step=0)) == [5]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"sampling": "uniform"}, [1, 1, 1, 1]),
        ({"sampling": "weighted"}, [1, 2, 3, 4]),
        ({"sampling": "weighted", "exponent": 2.0}, [1, 4, 9, 16]),
        ({"sampling": "weighted", "priority": "recency"}, [1 / 4, 1 / 3, 1 / 2, 1]),
    ],
)
def test_single_draws_are_distributed_as_stated(settings: dict[str, Any], weights: list[float]) -> None:
    """Pearson's chi-square with 3 degrees of freedom: 16.27 is exceeded once in a thousand such tests."""
    kept, draws = buffer([0.1, 0.2, 0.3, 0.4], groups=1, **settings), 4000
    counts = Counter(ids(kept.sample(version=4, step=step))[0] for step in range(draws))
    expected = [draws * weight / sum(weights) for weight in weights]
    assert sum((counts[i] - mean) ** 2 / mean for i, mean in enumerate(expected)) < 16.27


def test_two_are_drawn_one_after_the_other_in_proportion_to_what_is_left() -> None:
    """Of weights 1, 2, 5: {0, 1} has 1/8 * 2/7 + 2/8 * 1/6, and so on; 13.82 is one in a thousand for 2 degrees."""
    kept, draws, weight = buffer([0.1, 0.2, 0.5], groups=2, sampling="weighted"), 4000, [1, 2, 5]
    counts = Counter(tuple(ids(kept.sample(version=3, step=step))) for step in range(draws))
    for_pair = {
        (i, j): draws * (weight[i] / 8 * weight[j] / (8 - weight[i]) + weight[j] / 8 * weight[i] / (8 - weight[j]))
        for i, j in ((0, 1), (0, 2), (1, 2))
    }
    assert sum((counts[pair] - mean) ** 2 / mean for pair, mean in for_pair.items()) < 13.82


def test_groups_without_any_priority_come_last_but_come() -> None:
    """An environment's advantages may be all zero; the draw stays as large."""
    kept = buffer([0.0, 0.0, 1e-9, 1e9], groups=3, sampling="weighted", exponent=3.0)
    for step in range(20):
        sampled = ids(kept.sample(version=4, step=step))
        assert len(sampled) == 3
        assert {2, 3} <= set(sampled)
