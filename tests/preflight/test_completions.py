"""The completions that `doctor` draws are checked like those of a run, and summarized for its table."""

from __future__ import annotations

from clotho.preflight.completions import completion_findings, examples, reward_rows, stop_reasons
from protocols.finding import Finding
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from protocols.sampling import FinishReason
from tests.monitoring.display_examples import completion, prompt

EXPECTED = {"format": "<think>...</think>"}


def scored(rewards: tuple[float, ...], *, finish: FinishReason = "stop") -> GroupOutcome:
    """A scored group; discarded if its rewards are equal."""
    completions = tuple(completion(text=f"4 ({i})", finish=finish) for i in range(len(rewards)))
    parts: dict[str, tuple[float | None, ...]] = {"format": rewards}
    if len(set(rewards)) == 1:
        return Discarded(
            prompt=prompt(), reason="zero_variance", detail="", completions=completions, rewards=rewards, parts=parts
        )
    group = RolloutGroup(prompt=prompt(), completions=completions)
    return ScoredGroup(group=group, rewards=rewards, parts=parts)


def findings(*outcomes: GroupOutcome) -> list[Finding]:
    """The findings about these groups."""
    return list(completion_findings(outcomes, EXPECTED))


def test_completions_with_different_rewards_have_no_finding() -> None:
    """One group with different rewards suffices."""
    assert findings(*[scored((0.0, 0.0))] * 3, scored((0.0, 1.0))) == []


def test_equal_rewards_are_a_finding_with_a_completion() -> None:
    """All 0 and all 1 have a name each."""
    (none,) = findings(*[scored((0.0, 0.0))] * 4)
    (all_correct,) = findings(*[scored((1.0, 1.0))] * 4)
    assert (none.name, all_correct.name) == ("no_reward", "always_rewarded")
    assert "4 (0)" in none.example


def test_truncated_completions_are_a_finding_whatever_their_rewards() -> None:
    """Once, although several checks see the truncation."""
    (equal,) = findings(*[scored((0.0, 0.0), finish="length")] * 4)
    (different,) = findings(*[scored((0.0, 1.0), finish="length")] * 4)
    assert equal.name == different.name == "all_truncated"


def test_the_table_has_the_range_of_every_reward_and_the_stop_reasons() -> None:
    """A reward that failed is listed with its error, and not as 0."""
    failed = Discarded(prompt=prompt(), reason="reward_error", detail="KeyError", completions=(completion(),))
    rows = dict(reward_rows([scored((0.0, 1.0)), failed]))
    assert rows["format"] == rows["sum"] == "mean 0.5, 0 to 1 (2 values)"
    assert rows["failed"] == "1 of 2 groups: KeyError"
    assert dict(reward_rows([failed]))["sum"] == "no value"
    assert stop_reasons([completion(), completion(finish="length"), completion()]) == "2 stop, 1 length"
    assert [reward for _, _, reward, _ in examples([scored((0.0, 1.0)), failed])] == [0.0, 1.0, None]
    assert len(list(examples([scored((0.0, 1.0))] * 20))) == 16
