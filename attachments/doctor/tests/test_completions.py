"""The completions that `doctor` draws are checked like those of a run, and summarized for its table."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from attachments.doctor.completions import (
    Completed,
    completion_findings,
    examples,
    next_draw,
    rehearsal_batches,
    reward_rows,
    stop_reasons,
)
from attachments.doctor.doctor import episode_lines
from protocols.finding import Finding
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from protocols.sampling import CompletionTurn, FinishReason
from tests.training_run.built_context import tiny_profile
from tests.training_run.records.display_examples import completion, prompt

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


@pytest.mark.parametrize(("groups", "severity"), [(4, "warning"), (64, "error")])
@pytest.mark.parametrize(
    ("rewards", "finish", "name"),
    [
        ((0.0, 0.0), "stop", "no_reward"),
        ((1.0, 1.0), "stop", "always_rewarded"),
        ((0.0, 0.0), "length", "all_truncated"),
    ],
)
def test_equal_rewards_of_a_few_completions_are_a_warning(
    groups: int, severity: str, rewards: tuple[float, ...], finish: FinishReason, name: str
) -> None:
    """After 128 completions they are an error."""
    (finding,) = findings(*[scored(rewards, finish=finish)] * groups)
    assert (finding.name, finding.severity) == (name, severity)


@pytest.mark.parametrize(("groups", "bound"), [(8, "17%"), (64, "2%")])
def test_a_reward_that_was_never_earned_has_a_bound(groups: int, bound: str) -> None:
    """The exact bound of a confidence of 95 %: 0 of 16 is what one in twenty policies with 17 % success shows."""
    (finding,) = findings(*[scored((0.0, 0.0))] * groups)
    assert bound in finding.fact
    assert "95%" in finding.fact


def test_equal_rewards_within_every_group_are_a_finding_although_groups_differ() -> None:
    """As with a temperature near 0. The bound is that of the number of groups."""
    (few,) = findings(*[scored((0.0, 0.0)), scored((1.0, 1.0))] * 4)
    (many,) = findings(*[scored((0.0, 0.0)), scored((1.0, 1.0))] * 32)
    assert (few.name, few.severity, many.name, many.severity) == ("no_signal", "warning", "no_signal", "error")
    assert "31%" in few.fact
    assert findings(*[scored((0.0, 0.0)), scored((1.0, 1.0))] * 4, scored((0.0, 1.0))) == []


def test_a_reward_that_fails_for_every_group_is_an_error_at_once() -> None:
    """No further completion can change it."""
    failed = Discarded(prompt=prompt(), reason="reward_error", detail="KeyError", completions=(completion(),) * 4)
    (finding,) = findings(*[failed] * 4)
    assert (finding.name, finding.severity) == ("rewards_fail", "error")


def test_completions_are_drawn_until_they_have_a_signal_and_fill_two_batches(tmp_path: Path) -> None:
    """First 4 of each of 4 problems; then up to 128 without different rewards in a group, and up to 256 with them."""
    profile = tiny_profile(tmp_path, learner={"batch_size": 6}, sampling={"group_size": 8})
    look, equal, different = [scored((0.0,) * 4)] * 4, scored((0.0,) * 8), scored((0.0,) * 7 + (1.0,))
    failed = Discarded(prompt=prompt(), reason="reward_error", detail="KeyError", completions=(completion(),) * 4)
    assert next_draw(profile, []) == (4, 4)
    assert next_draw(profile, look) == (14, 8)
    assert next_draw(profile, [*look, *[equal] * 14]) is None
    assert next_draw(profile, [*look, *[equal] * 4, different]) == (7, 8)
    assert next_draw(profile, [*look, *[equal] * 11, different]) is None
    assert next_draw(profile, [failed] * 4) is None


def test_batches_that_are_too_large_are_drawn_in_part(tmp_path: Path) -> None:
    """At most 16 completions of a problem, and 256 in all."""
    profile = tiny_profile(tmp_path, learner={"batch_size": 64}, sampling={"group_size": 64})
    assert next_draw(profile, [scored((0.0, 0.0, 1.0, 1.0))] * 4) == (15, 16)


def test_two_updates_are_rehearsed_with_different_groups(tmp_path: Path) -> None:
    """Of the largest groups, those with different rewards; no more than two batches have."""
    profile = tiny_profile(tmp_path, learner={"batch_size": 2})
    small, equal = scored((0.0, 1.0)), scored((0.0,) * 4)
    first, second, third = (scored((0.0, 0.0, value, 1.0)) for value in (0.1, 0.2, 0.3))
    assert rehearsal_batches(profile, [small, first, small, equal, second, third]) == ([first, third], [second])
    assert rehearsal_batches(profile, [equal, first]) == ([first], [])


def test_truncated_completions_are_a_finding_whatever_their_rewards() -> None:
    """Once, although several checks see the truncation."""
    (equal,) = findings(*[scored((0.0, 0.0), finish="length")] * 4)
    (different,) = findings(*[scored((0.0, 1.0), finish="length")] * 4)
    assert equal.name == different.name == "all_truncated"


def test_truncation_with_a_signal_is_a_finding_if_nearly_all_are_truncated() -> None:
    """A policy learns to end its answers, if some of them end."""
    ended, cut = scored((0.0, 1.0)), scored((0.0, 0.0), finish="length")
    assert findings(*[cut] * 3, *[ended] * 2) == []
    assert [finding.name for finding in findings(*[cut] * 19, *[ended] * 2)] == ["truncated"]


def test_the_table_has_the_range_of_every_reward_and_the_stop_reasons() -> None:
    """A reward that failed is listed with its error, and not as 0."""
    failed = Discarded(prompt=prompt(), reason="reward_error", detail="KeyError", completions=(completion(),))
    rows = dict(reward_rows([scored((0.0, 1.0)), failed]))
    assert rows["format"] == rows["sum"] == "mean 0.5, 0 to 1 (2 values)"
    assert rows["failed"] == "1 of 2 groups: KeyError"
    assert dict(reward_rows([failed]))["sum"] == "no value"
    assert stop_reasons([completion(), completion(finish="length"), completion()]) == "2 stop, 1 length"
    assert [one.reward for one in examples([scored((0.0, 1.0)), failed])] == [0.0, 1.0, None]
    assert len(list(examples([scored((0.0, 1.0))] * 20))) == 16


def test_an_episode_is_printed_with_its_mask() -> None:
    """Each turn with its text, and whether it is trained on; a completion of one turn has no such lines."""
    turns = (
        CompletionTurn(sampled=True, tokens=1, characters=2),
        CompletionTurn(sampled=False, tokens=2, characters=1),
        CompletionTurn(sampled=True, tokens=4, characters=1),
    )
    single = Completed(prompt="p", completion="abcd", reward=1.0, stop_reason="stop", turns=())
    _, *lines = episode_lines([single, replace(single, turns=turns)])
    assert [("not trained on" in line, line.rpartition(": ")[2]) for line in lines] == [
        (False, "ab"),
        (True, "c"),
        (False, "d"),
    ]
    assert list(episode_lines([single])) == []
