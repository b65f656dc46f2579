"""Groups of rewarded sessions, on their way to the learner.

Members of a named group are attempts at one task, as in GRPO (arXiv:2402.03300). Other members of a scenario form a
group in the order of their rewards, whatever their tasks are. The advantage is then the reward minus the mean of recent
rewards: REINFORCE with a baseline that does not depend on the task (Williams 1992, doi:10.1007/BF00992696). It is
unbiased but for the factor 1 - 1/G of a mean over G rewards with the own one, and has more variance than a baseline of
the task.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain, islice

import anyio
from msgspec import Struct

from attachments.sessions.rows import Trajectory

MAX_NAMES = 16_384
"""Names of sessions and of groups that have ended, of which the newest are known."""

MAX_SCENARIOS = 64
"""Scenarios, each of which has counts of its own in a checkpoint."""


class Member(Struct, frozen=True, kw_only=True, eq=False):
    """What has one reward. ended: called once, with the reason why it was not trained on; empty if it was."""

    trajectories: tuple[Trajectory, ...]
    reward: float
    ended: Callable[[str], None]

    @property
    def size(self) -> int:
        """Number of bytes that are kept."""
        return sum(trajectory.size for trajectory in self.trajectories)


class SessionGroup:
    """Members that are compared with each other.

    name: empty: the next members of a scenario. touched: time of the last reward. complete: it waits for the learner.
    """

    def __init__(self, name: str, scenario: str) -> None:
        self.name, self.scenario, self.touched, self.complete = name, scenario, 0.0, False
        self.members: list[Member] = []

    @property
    def size(self) -> int:
        """Number of bytes that are kept of its members."""
        return sum(member.size for member in self.members)


class SessionGroups:
    """Collects the groups of a run.

    size: number of members of a complete group. kept: number of bytes of the members that nobody has taken.
    """

    def __init__(self, *, size: int, clock: Callable[[], float]) -> None:
        self.size, self._clock, self.kept = size, clock, 0
        self._open: dict[tuple[str, str], SessionGroup] = {}  # by name, or by scenario
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._ready: deque[SessionGroup] = deque()
        self._arrived = anyio.Event()
        self._scenarios: set[str] = set()

    def refusal(self, name: str, scenario: str, members: Sequence[Member], *, closes: bool) -> str:
        """Return why members cannot join a group; empty if they can. name: empty: of the scenario.

        closes: they are its last members; there may be none.
        """
        if name in self._closed:
            return f"the group '{name}' is complete"
        if scenario not in self._scenarios and len(self._scenarios) >= MAX_SCENARIOS:
            return f"the run has {MAX_SCENARIOS} scenarios, and '{scenario}' would be one more"
        group = self._open.get(_key(name, scenario))
        before = group.members if group else []
        if closes and not (before or members):
            return f"the group '{name}' has no member"
        if name and len(before) + len(members) > self.size:
            return f"the group '{name}' has {len(before)} of {self.size} members (sampling.group_size)"
        found = chain.from_iterable(one.trajectories for one in (*before[:1], *members))
        if len({trajectory.answers[0].row.tokens[0] for trajectory in found}) > 1:
            return "its prompts do not begin with the same token as those of its group, so that they share no context"
        return ""

    def add(self, name: str, scenario: str, members: Sequence[Member], *, close: bool) -> SessionGroup:
        """Add members that are not refused, and return the group of the last. close: it is complete with them."""
        self._scenarios.add(scenario)
        key = _key(name, scenario)
        group = self._open.setdefault(key, SessionGroup(name, scenario))
        for member in members:
            group = self._open.setdefault(key, SessionGroup(name, scenario))
            group.members.append(member)
            group.touched = self._clock()
            self.kept += member.size
            if len(group.members) >= self.size:
                self._complete(group)
        if close and not group.complete:
            self._complete(group)
        return group

    def _complete(self, group: SessionGroup) -> None:
        self._forget(group)
        group.complete = True
        self._ready.append(group)
        self._arrived.set()

    def _forget(self, group: SessionGroup) -> None:
        del self._open[_key(group.name, group.scenario)]
        if group.name:
            self._closed[group.name] = None
            if len(self._closed) > MAX_NAMES:
                self._closed.popitem(last=False)

    def expire(self, before: float) -> None:
        """Drop groups that are incomplete, and whose last member was rewarded before this time."""
        for group in [one for one in self._open.values() if one.touched < before]:
            self._drop(group, "incomplete")

    def evict(self) -> bool:
        """Drop the group that has waited longest; return whether there is one."""
        if self._ready:
            self._leave(self._ready.popleft(), "evicted")
        elif self._open:
            self._drop(min(self._open.values(), key=lambda group: group.touched), "evicted")
        else:
            return False
        return True

    def _drop(self, group: SessionGroup, reason: str) -> None:
        self._forget(group)
        self._leave(group, reason)

    def _leave(self, group: SessionGroup, reason: str) -> None:
        self.kept -= group.size
        for member in group.members:
            member.ended(reason)

    async def next(self, seconds: float) -> SessionGroup | None:
        """Wait for a complete group and take it; None after some time without one."""
        with anyio.move_on_after(seconds):
            while not self._ready:
                self._arrived = anyio.Event()
                await self._arrived.wait()
        if not self._ready:
            return None
        group = self._ready.popleft()
        self.kept -= group.size
        return group

    def incomplete(self) -> str:
        """Return how many members the first incomplete groups have, for people."""
        first = islice(self._open.values(), 4)
        return ", ".join(f"{one.name or one.scenario}: {len(one.members)} of {self.size}" for one in first)


def _key(name: str, scenario: str) -> tuple[str, str]:
    return ("group", name) if name else ("scenario", scenario)
