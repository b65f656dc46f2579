"""Groups of rewarded sessions, and their way to the learner."""

from __future__ import annotations

import pytest

from attachments.sessions.groups import MAX_SCENARIOS, SessionGroups
from attachments.sessions.rows import TOKEN_BYTES
from attachments.sessions.supply import SessionReader, SessionSource
from attachments.sessions.tests.recorded import Attempt, row, sample
from protocols.rollout import Discarded, ScoredGroup
from protocols.step import TrainedGroup


class Clock:
    """Groups of two members. now: their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.groups = SessionGroups(size=2, clock=lambda: self.now)

    def add(self, attempt: Attempt, name: str = "", *, scenario: str = "s", close: bool = False) -> bool:
        """Add a member that is not refused; return whether its group is complete."""
        assert not self.groups.refusal(name, scenario, [attempt.member], closes=close)
        return self.groups.add(name, scenario, [attempt.member], close=close).complete


@pytest.fixture
def at() -> Clock:
    """No group has a member."""
    return Clock()


async def test_a_named_group_is_complete_with_its_last_member(at: Clock) -> None:
    """Others do not delay it, and it takes no further ones."""
    assert [at.add(Attempt(), name) for name in ("a", "b", "a")] == [False, False, True]
    found = await at.groups.next(0.0)
    assert found is not None
    assert found.name == "a"
    assert await at.groups.next(0.0) is None
    assert "complete" in at.groups.refusal("a", "s", [Attempt().member], closes=False)
    assert "members" in at.groups.refusal("b", "s", [Attempt().member] * 2, closes=False)


async def test_a_client_can_complete_a_group_earlier(at: Clock) -> None:
    """With the members that it has, but not without any."""
    assert at.groups.refusal("a", "s", [], closes=True)
    assert at.add(Attempt(), "a", close=True)
    at.add(Attempt(), "b")
    assert at.groups.add("b", "s", [], close=True).complete


async def test_rewards_without_a_group_are_compared_with_the_next_of_their_scenario(at: Clock) -> None:
    """In the order of their rewards; a post can fill several groups."""
    assert [at.add(Attempt(), scenario=name) for name in ("x", "y", "y", "x")] == [False, False, True, True]
    members = [Attempt().member for _ in range(5)]
    assert not at.groups.add("", "x", members, close=False).complete
    assert at.groups.incomplete() == "x: 1 of 2"


def test_members_share_their_first_token(at: Clock) -> None:
    """Without a common context, there is no prompt that the learner could evaluate them behind."""
    at.add(Attempt(), "a")
    assert not at.groups.refusal("b", "s", [Attempt(prompt=(7, 2)).member], closes=False)
    for name, members in (("a", [Attempt(prompt=(7, 2))]), ("c", [Attempt(), Attempt(prompt=(7, 2))])):
        assert "same token" in at.groups.refusal(name, "s", [one.member for one in members], closes=False)


def test_the_number_of_scenarios_is_limited(at: Clock) -> None:
    """Each has counts of its own in checkpoints."""
    for number in range(MAX_SCENARIOS):
        at.add(Attempt(), scenario=f"s{number}")
    assert at.groups.refusal("", "more", [Attempt().member], closes=False)
    assert not at.groups.refusal("", "s0", [Attempt().member], closes=False)


def test_names_of_the_latest_groups_are_not_used_again(at: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of older ones nothing is held."""
    monkeypatch.setattr("attachments.sessions.groups.MAX_NAMES", 2)
    for name in ("a", "b", "c"):
        for _ in range(2):
            at.add(Attempt(), name)
    refused = [bool(at.groups.refusal(name, "s", [Attempt().member], closes=False)) for name in ("a", "b", "c")]
    assert refused == [False, True, True]


async def test_groups_that_wait_too_long_or_take_too_much_memory_are_dropped(at: Clock) -> None:
    """Their members are told; complete groups give way first, because their tokens are the oldest."""
    attempts = [Attempt() for _ in range(5)]
    at.add(attempts[0], "old")
    at.now = 5.0
    for attempt, name in zip(attempts[1:], ("full", "full", "half", "rest"), strict=True):
        at.add(attempt, name)
    at.groups.expire(5.0)
    assert attempts[0].ends == ["incomplete"]
    assert [at.groups.evict() for _ in range(4)] == [True, True, True, False]
    assert [one.ends for one in attempts[1:]] == [["evicted"]] * 4
    assert at.groups.kept == 0


async def test_the_source_gives_one_group_at_a_time(at: Clock) -> None:
    """So that the bound of staleness is exact."""
    source = SessionSource(at.groups, lambda: "a reward")
    for name in ("a", "b"):
        at.add(Attempt(), name, close=True)
    await source.open(step=0)
    assert [one.name for one in await source.batch(step=0) or ()] == ["a"]
    assert at.groups.kept == 3 * TOKEN_BYTES
    assert await source.waiting_for() == "a reward"
    await source.close()


def reader(*, across_groups: bool = False) -> SessionReader:
    """Return a reader of a run at temperature 1."""
    return SessionReader(decode=lambda tokens: " ".join(map(str, tokens)), temperature=1.0, across_groups=across_groups)


async def test_a_group_reaches_the_learner_with_all_rows_of_its_members(at: Clock) -> None:
    """Each row has the reward of its member, and the temperature at which it was sampled."""
    forked = Attempt(1.0, row(sample((1, 2), (3,))), row(sample((1, 2, 9), (4,), temperature=0.5)))
    at.groups.add("a", "s", [forked.member, Attempt(0.0).member], close=False)
    group = await at.groups.next(0.0)
    assert group is not None
    scored = await reader().read(group, group_id=7, version=3)
    assert isinstance(scored, ScoredGroup)
    prompt = scored.group.prompt
    assert (prompt.group_id, prompt.tokens, prompt.source, prompt.problem.prompt) == (7, (1, 2), "s", "1 2")
    assert scored.rewards == (1.0, 1.0, 0.0)
    assert scored.temperatures == (1.0, 0.5, 1.0)
    assert [one.tokens for one in scored.group.completions] == [(3,), (9, 4), (3,)]


@pytest.mark.parametrize("across_groups", [False, True])
async def test_equal_rewards_have_no_signal_within_their_group(at: Clock, across_groups: bool) -> None:
    """Unless advantages are computed across the groups of a batch."""
    at.groups.add("a", "s", [Attempt(0.5).member, Attempt(0.5).member], close=False)
    group = await at.groups.next(0.0)
    assert group is not None
    found = await reader(across_groups=across_groups).read(group, group_id=0, version=0)
    assert isinstance(found, ScoredGroup) == across_groups
    assert isinstance(found, ScoredGroup) or (found.reason, found.rewards) == ("zero_variance", (0.5, 0.5))


async def test_members_are_told_how_their_group_has_ended(at: Clock) -> None:
    """Once, and only those of groups of sessions."""
    hook, attempts = reader(), [Attempt(float(number)) for number in range(4)]
    found = []
    for number, name in enumerate("aabb"):
        at.groups.add(name, "s", [attempts[number].member], close=False)
    for group_id in range(2):
        group = await at.groups.next(0.0)
        assert group is not None
        found.append(await hook.read(group, group_id=group_id, version=0))
    trained, stale = found
    assert isinstance(trained, ScoredGroup)
    assert isinstance(stale, ScoredGroup)
    ends = [TrainedGroup(scored=trained, advantages=(0.0, 0.0))]
    dropped = [Discarded(prompt=stale.group.prompt, reason="stale", detail="")]
    for _ in range(2):
        hook.ended(ends, dropped, version=0)
    assert [one.ends for one in attempts] == [[""], [""], ["stale"], ["stale"]]
