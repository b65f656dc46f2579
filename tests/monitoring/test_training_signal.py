"""Findings about the rewards: each common fault has its own, and a healthy run has none."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from clotho.monitoring.training_signal import TrainingSignal
from protocols.rollout import Discarded, DiscardReason
from protocols.sampling import FinishReason
from protocols.step import GroupsEnded
from tests.monitoring.display_examples import completion, prompt

EXPECTED = {"format": "<think>...</think><answer>...</answer>"}


def groups(
    count: int,
    rewards: tuple[float, ...] = (0.0, 0.0),
    *,
    parts: dict[str, tuple[float | None, ...]] | None = None,
    reason: DiscardReason = "zero_variance",
    finish: FinishReason = "stop",
) -> GroupsEnded:
    """A report with this number of equal groups. parts: the rewards as `format`, if not given."""
    found = Discarded(
        prompt=prompt(),
        reason=reason,
        detail="raised KeyError: 'x'" if reason == "reward_error" else "",
        completions=tuple(completion(text=f"4 ({i})", finish=finish) for i in range(len(rewards))),
        rewards=() if reason == "reward_error" else rewards,
        parts={} if reason == "reward_error" else parts or {"format": rewards},
    )
    return GroupsEnded(step=1, discarded=(found,) * count)


def names(*reports: GroupsEnded) -> set[str]:
    """The findings after these reports."""
    signal = TrainingSignal(EXPECTED)
    for report in reports:
        signal.observe(report)
    return set(signal.active)


def test_a_first_batch_without_any_reward_is_a_finding_with_an_example() -> None:
    """The finding states the value of every reward, what the reward expects, and one completion."""
    signal = TrainingSignal(EXPECTED)
    with capture_logs() as events:
        signal.observe(groups(4))
    (event,) = events
    assert (event["finding"], event["log_level"]) == ("no_reward", "warning")
    assert EXPECTED["format"] in event["fact"]
    assert event["example"].startswith("What is 2 + 2? -> 4 (0)")
    (finding,) = signal.findings
    assert (finding.severity, finding.consequence != "") == ("error", True)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (groups(4), "no_reward"),
        (groups(4, (1.0, 1.0)), "always_rewarded"),
        (groups(4, reason="reward_error"), "rewards_fail"),
        (groups(32, (0.0, 1.0), parts={"a": (0.0, 1.0), "b": (0.0, 0.0)}), "constant_reward_part"),
        (groups(4, (0.0,) * 39 + (1.0,), finish="length"), None),
        (groups(4, (0.0, 1.0)), None),
        (groups(3), None),
        (groups(8, reason="stale"), None),
    ],
    ids=["all 0", "all 1", "raises", "one part 0", "truncated with reward", "healthy", "few groups", "stale"],
)
def test_a_fault_of_the_rewards_has_its_own_finding(report: GroupsEnded, expected: str | None) -> None:
    """A healthy batch, a few groups and stale groups have none."""
    assert names(report) == ({expected} if expected else set())


def test_truncated_completions_without_a_reward_are_a_finding() -> None:
    """Nearly all completions are truncated, and only a completion that ended earned a reward."""
    ended = groups(1, (1.0, 0.0))
    assert names(groups(15, (0.0, 0.0), finish="length"), ended) == {"truncated_without_reward"}
    assert names(groups(6, (0.0, 0.0), finish="length"), groups(6, (1.0, 0.0))) == set()


def test_a_finding_ends_when_the_fault_ends() -> None:
    """It is logged once, however long it lasts, and once more when it is over."""
    signal = TrainingSignal(EXPECTED)
    with capture_logs() as events:
        for report in (groups(4), groups(4), groups(4, (0.0, 1.0))):
            signal.observe(report)
    assert [event["event"] for event in events] == ["training_signal", "training_signal_recovered"]
    assert signal.findings == ()


def test_a_part_that_is_always_one_is_no_finding() -> None:
    """The policy has mastered the format; the other rewards still vary."""
    assert names(groups(32, (1.0, 2.0), parts={"format": (1.0, 1.0), "b": (0.0, 1.0)})) == set()
