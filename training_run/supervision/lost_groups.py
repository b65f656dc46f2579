"""Groups that a custom actor has received and does not send on: they are discarded as `lost`, and the run ends.

A custodian stands beside each custom actor that groups pass through. It knows the groups inside the actor from the ends
of its queues. Groups that are inside when the actor returns are lost. So are groups inside an actor that waits for its
next message while nothing in the flow has moved for a time limit: in a synchronous run, the next message depends on
these groups. The custodian then sends each lost group on as `Discarded`, so that every group is counted, and the batch
that waits for it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import anyio

from protocols.finding import Finding, Remedy
from protocols.prompt import Prompt
from protocols.queues import QueueClosed
from protocols.rollout import Discarded, RolloutGroup, ScoredGroup
from training_run.profile.schema import ActorSection
from training_run.supervision.queues import Queue, QueueEnd, QueueOutbox
from training_run.supervision.supervisor import Child, transient

if TYPE_CHECKING:
    from training_run.groups.progress import LearnerProgress

PLACES = ("prompts", "generator", "rollouts", "scorer", "scored")
"""The queues and actors that groups pass, in the order of the flow."""

MAX_NAMED = 20
"""Number of lost groups of an actor that a finding names."""

LOOKS = 20
"""Number of times that a custodian looks at the flow within its time limit."""

WHILE_DRAINING = 0.1
"""Share of the time limit that suffices while the run drains."""


@runtime_checkable
class Working(Protocol):
    """An actor that says how many groups it works on, as the generator, the scorer and some custom actors do."""

    working_on: int


class Flow:
    """Whether anything moves between the source of the groups and the learner."""

    def __init__(
        self,
        progress: LearnerProgress,
        queues: Sequence[Queue[Any]],
        actors: Sequence[Child],
        *,
        is_draining: Callable[[], bool],
    ) -> None:
        """queues: those of groups and of updates. actors: those before the learner.

        is_draining: whether the run ends after the groups in flight.
        """
        self._progress, self._queues = progress, queues
        self._working = [child.actor for child in actors if isinstance(child.actor, Working)]
        self.is_draining = is_draining

    @property
    def activity(self) -> tuple[int, ...]:
        """Counts that change whenever anything moves."""
        return (self._progress.step, *(count for queue in self._queues for count in (queue.sent, queue.received)))

    @property
    def is_working(self) -> bool:
        """Whether an actor says that it works on a group, or the learner trains."""
        return self._progress.updating or any(actor.working_on for actor in self._working)


class LostGroups:
    """The custodians of a run, and the groups that custom actors have lost since the start."""

    def __init__(
        self,
        *,
        limit_seconds: float,
        report: Callable[[Finding], None],
        end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """limit_seconds: how long nothing must have moved. `flow` must be set before the custodians run.

        report: takes the finding about all lost groups. end: lets the run end after the groups in flight.
        """
        self.limit_seconds, self.clock = limit_seconds, clock
        self._report, self._end = report, end
        self.custodians: list[Custodian] = []
        self.flow: Flow | None = None

    @property
    def count(self) -> int:
        """Number of lost groups."""
        return sum(len(custodian.lost) for custodian in self.custodians)

    @property
    def children(self) -> list[Child]:
        """The custodians, as children of the supervisor."""
        return [transient(custodian) for custodian in self.custodians]

    def watch(self, section: ActorSection, inbox: QueueEnd, outbox: QueueOutbox[Any]) -> Callable[[], None]:
        """Watch a custom actor with these ends. Returns what must be called when the actor has returned."""
        custodian = Custodian(self, section, inbox, outbox)
        self.custodians.append(custodian)
        return custodian.returned.set

    def is_first(self, custodian: Custodian) -> bool:
        """Whether no actor before this one in the flow has groups inside, for which this one may wait."""
        return not any(other.inside for other in self.custodians if other.place < custodian.place)

    def add(self, *, is_still: bool) -> None:
        """Report the lost groups of all custodians. is_still: the run cannot go on without them; it ends."""
        losers = "; ".join(
            f"{custodian.described}: groups {_listed(custodian.lost)}"
            for custodian in self.custodians
            if custodian.lost
        )
        self._report(
            Finding(
                name="groups_lost",
                severity="error",
                fact=f"groups went into a custom actor and did not come out: {losers}",
                consequence=f"{self.count} discarded as lost, and the run ends with exit status 1",
                advice="let the actor send on every group, or a Discarded with its prompt and a reason; then continue",
                remedy=Remedy(action="resume"),
            )
        )
        if is_still:
            self._end()


def _listed(lost: list[int]) -> str:
    more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
    return f"{', '.join(map(str, lost[:MAX_NAMED]))}{more}"


class Custodian:
    """Knows the groups inside one custom actor, and discards those that it has lost.

    inside: prompts of the groups by id. lost: ids of the lost groups. place: where the actor is in the flow.
    returned: set when the actor sends nothing any more.
    """

    def __init__(self, run: LostGroups, section: ActorSection, inbox: QueueEnd, outbox: QueueOutbox[Any]) -> None:
        """inbox, outbox: those of the actor; the custodian opens an outbox of its own beside that of the actor."""
        self.name = f"custodian of {section.name}"
        self.described = f"{section.name} ({section.mode} at {section.at})"
        self.place = PLACES.index(section.at), len(run.custodians)
        self.inside: dict[int, Prompt] = {}
        self.lost: list[int] = []
        self._run, self._inbox, self._outbox = run, inbox, outbox.beside()
        self.returned = anyio.Event()
        self._activity: tuple[int, ...] = ()
        self._since = run.clock()
        inbox.observe, outbox.observe = self._received, self._sent

    async def run(self) -> None:
        """Discard lost groups until the actor has returned."""
        async with self._outbox:
            while not self.returned.is_set():
                with anyio.move_on_after(self._run.limit_seconds / LOOKS):
                    await self.returned.wait()
                if not self.returned.is_set() and self.is_still():
                    await self._discard()
            await self._discard()

    def is_still(self) -> bool:
        """Whether the actor waits for its next message, has groups inside, and nothing has moved for the time limit."""
        flow, before, now = self._run.flow, self._activity, self._run.clock()
        assert flow is not None
        self._activity = flow.activity
        waits = bool(self.inside) and self._inbox.is_waiting and self._run.is_first(self)
        if not waits or flow.is_working or self._activity != before:
            self._since = now
            return False
        return now - self._since >= self._run.limit_seconds * (WHILE_DRAINING if flow.is_draining() else 1.0)

    def _received(self, message: Any) -> None:
        if (prompt := _prompt(message)) is not None:
            self.inside[prompt.group_id] = prompt

    def _sent(self, message: Any) -> None:
        if (prompt := _prompt(message)) is not None:
            self.inside.pop(prompt.group_id, None)

    async def _discard(self) -> None:
        if not self.inside:
            return
        inside, self.inside = self.inside, {}
        self.lost += inside
        self._run.add(is_still=not self.returned.is_set())
        detail = f"{self.described} received the group and did not send it on"
        with suppress(QueueClosed):  # every receiver has ended
            for prompt in inside.values():
                await self._outbox.send(Discarded(prompt=prompt, reason="lost", detail=detail))


def _prompt(message: Any) -> Prompt | None:
    """Return the prompt of a message; None if it is no group."""
    if isinstance(message, Prompt):
        return message
    return message.prompt if isinstance(message, ScoredGroup | RolloutGroup | Discarded) else None
