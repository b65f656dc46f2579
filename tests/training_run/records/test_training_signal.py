"""Findings about the rewards: each common fault has its own, and a healthy run has none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocols.finding import Finding
from protocols.rollout import Discarded, DiscardReason
from protocols.sampling import FinishReason
from protocols.step import GroupsEnded, StepReport
from tests.training_run.records.display_examples import completion, prompt, step, trained
from training_run.records.training_signal import TrainingSignal

EXPECTED = {"format": "<think>...</think><answer>...</answer>"}


def group(
    rewards: tuple[float, ...] = (0.0, 0.0),
    *,
    parts: dict[str, tuple[float | None, ...]] | None = None,
    reason: DiscardReason = "zero_variance",
    finish: FinishReason = "stop",
    correct: tuple[bool, ...] = (),
) -> Discarded:
    """Return a discarded group. parts: the rewards as `format`, if not given."""
    return Discarded(
        prompt=prompt(),
        reason=reason,
        detail="raised KeyError: 'x'" if reason == "reward_error" else "",
        completions=tuple(completion(text=f"4 ({i})", finish=finish) for i in range(len(rewards))),
        rewards=() if reason == "reward_error" else rewards,
        parts={} if reason == "reward_error" else parts or {"format": rewards},
        correct=correct,
    )


def groups(count: int, rewards: tuple[float, ...] = (0.0, 0.0), **options: object) -> GroupsEnded:
    """A report with this number of equal groups."""
    return GroupsEnded(step=1, discarded=(group(rewards, **options),) * count)  # type: ignore[arg-type]


def findings(*reports: StepReport | GroupsEnded) -> tuple[Finding, ...]:
    """The findings after these reports."""
    signal = TrainingSignal(EXPECTED)
    for report in reports:
        signal.observe(report)
    return tuple(signal.findings())


def names(*reports: StepReport | GroupsEnded) -> set[str]:
    """The names of the findings after these reports."""
    return {finding.name for finding in findings(*reports)}


def test_a_first_batch_without_any_reward_is_a_finding_with_an_example() -> None:
    """The finding states the value of every reward, what the reward expects, and one completion."""
    (finding,) = findings(groups(4))
    assert (finding.name, finding.severity) == ("no_reward", "error")
    assert EXPECTED["format"] in finding.fact
    assert finding.example.startswith("What is 2 + 2? -> 4 (0)")
    assert "data.system" in finding.advice


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (groups(4), "no_reward"),
        (groups(4, (1.0, 1.0)), "always_rewarded"),
        (groups(4, (0.1, 0.1), correct=(False, False)), "no_reward"),
        (groups(4, reason="reward_error"), "rewards_fail"),
        (groups(4, finish="length"), "all_truncated"),
        (groups(32, (0.0, 1.0), parts={"a": (0.0, 1.0), "b": (0.0, 0.0)}), "constant_reward_part"),
        (groups(4, (0.0,) * 39 + (1.0,), finish="length"), "all_truncated"),
        (groups(4, (0.0, 1.0)), None),
        (groups(3), None),
        (groups(8, reason="stale"), None),
    ],
    ids=[
        "all 0",
        "all 1",
        "all small and wrong",
        "raises",
        "all truncated",
        "one part 0",
        "truncated with reward",
        "healthy",
        "few groups",
        "stale",
    ],
)
def test_a_fault_of_the_rewards_has_its_own_finding(report: GroupsEnded, expected: str | None) -> None:
    """A healthy batch, a few groups and stale groups have none."""
    assert names(report) == ({expected} if expected else set())


@pytest.mark.parametrize(("truncated", "expected"), [(8, {"truncated"}), (3, set())])
def test_many_truncated_completions_that_earn_less_are_a_finding(truncated: int, expected: set[str]) -> None:
    """At least half of the completions. Truncated completions that earn as much as the others are none."""
    ended = groups(8, (1.0, 0.0))
    assert names(groups(truncated, (0.0, 0.0), finish="length"), ended) == expected
    assert names(groups(truncated, (1.0, 0.0), finish="length"), ended) == set()


def test_groups_that_nothing_rewards_are_no_finding() -> None:
    """A run without reward functions, such as one that learns from a teacher alone, gives them rewards of 0."""
    unrewarded = replace(group(), parts={}, correct=(None, None))
    assert names(GroupsEnded(step=1, discarded=(unrewarded,) * 8)) == set()


def test_a_finding_ends_when_the_fault_ends() -> None:
    """The checks see the latest groups only."""
    assert names(groups(4), groups(4), groups(4, (0.0, 1.0))) == set()


@pytest.mark.parametrize(
    ("solved", "unsolved", "advice"), [(8, 8, "harder problems and"), (15, 1, "harder"), (1, 15, "easier")]
)
def test_several_batches_without_a_signal_are_a_finding_with_their_cost(
    solved: int, unsolved: int, advice: str
) -> None:
    """It counts the groups that were all correct and all wrong. A batch with an update ends it."""
    dropped = (group((1.0, 1.0)),) * solved + (group((0.0, 0.0)),) * unsolved
    silent = step(1, groups=(), discarded=dropped, update=None)
    assert "no_signal" not in names(silent, silent)
    (finding,) = findings(silent, silent, silent)
    assert (finding.name, finding.severity) == ("no_signal", "error")
    assert f"in {3 * solved} groups all completions were correct, in {3 * unsolved} all were wrong" in finding.fact
    assert "took 1 s" in finding.consequence  # three batches of 0.3 s
    assert advice in finding.advice
    assert "no_signal" not in names(silent, silent, silent, step(2, groups=(trained(),)))


@pytest.mark.parametrize(("reward", "expected"), [(1.0, "too_easy"), (0.0, "too_hard")])
def test_problems_that_all_or_no_completions_solve_are_too_easy_or_too_hard(reward: float, expected: str) -> None:
    """Nine tenths of the latest groups, of which there are at least 24; other equal rewards do not count."""
    some = groups(3, (0.0, 1.0))
    assert names(groups(29, (reward, reward)), some) == {expected}
    assert names(groups(20, (reward, reward)), groups(2, (0.0, 1.0))) == set()
    assert names(groups(28, (reward, reward)), groups(4, (0.0, 1.0))) == set()
    assert names(groups(29, (0.5, 0.5)), some) == set()


def test_problems_are_too_easy_until_a_quarter_is_not_solved_by_all() -> None:
    """A share of nine tenths that comes and goes would be said again with every few steps."""
    signal = TrainingSignal({})
    found = []
    for solved in (29, 26, 23, 27):
        signal.observe(groups(solved, (1.0, 1.0)))
        signal.observe(groups(32 - solved, (0.0, 1.0)))
        found.append({finding.name for finding in signal.findings()})
    assert found == [{"too_easy"}, {"too_easy"}, set(), set()]


def test_a_part_that_is_always_one_is_no_finding() -> None:
    """The policy has mastered the format; the other rewards still vary."""
    assert names(groups(32, (1.0, 2.0), parts={"format": (1.0, 1.0), "b": (0.0, 1.0)})) == set()
