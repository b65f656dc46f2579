"""How a supervisor treats one of its children: the policy, as in OTP, and what can be seen from outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct

from clotho.runtime.actor import Runnable
from protocols.queues import Closable


class Restart(StrEnum):
    """When a child that ended is started again (Erlang/OTP, supervisor behaviour).

    PERMANENT: whenever it ends while the run goes on. It must not return by itself.
    TRANSIENT: when it failed. The run lasts until every transient child has returned.
    TEMPORARY: never. Its failure is reported, and never ends the run.
    """

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


class Child(Struct, frozen=True, kw_only=True, eq=False):
    """Wiring -> supervisor. One child and its policy; `permanent`, `transient` and `temporary` make them.

    max_restarts, within_seconds: the restart intensity. One restart more than `max_restarts` within any
    `within_seconds`, and the failure rises; 0 forgives nothing.
    make: makes the instance for each restart; without it, `run` of the same instance is called again.
    keeps: further ends of the child's mailboxes, held open while it is restarted (a failed actor closes its own, and
    for its neighbours that would be the end) and closed when it has ended for good.
    ends_with_input: a temporary child that returns when its inbox has ended. When the run has, it is given time to read
    what was sent before; any other is cancelled.
    """

    actor: Runnable
    restart: Restart
    max_restarts: int = 0
    within_seconds: float = 60.0
    make: Callable[[], Runnable] | None = None
    keeps: tuple[Closable, ...] = ()
    ends_with_input: bool = False

    def __post_init__(self) -> None:
        """Refuse a policy that contradicts itself."""
        if self.max_restarts < 0 or self.within_seconds <= 0:
            raise ValueError(f"child {self.name!r}: a restart intensity is N >= 0 restarts within S > 0 seconds")
        if self.restart is Restart.TEMPORARY and self.max_restarts:
            raise ValueError(f"child {self.name!r} is temporary, so it is never restarted: max_restarts must be 0")
        if self.make is not None and not self.max_restarts:
            raise ValueError(f"child {self.name!r} is never restarted: `make` would have no effect")
        if self.ends_with_input and self.restart is not Restart.TEMPORARY:
            raise ValueError(f"child {self.name!r} is {self.restart}: `ends_with_input` is for temporary ones")

    @property
    def name(self) -> str:
        """The name of its actor."""
        return self.actor.name


def permanent(
    actor: Runnable,
    *,
    max_restarts: int = 0,
    within_seconds: float = 60.0,
    make: Callable[[], Runnable] | None = None,
    keeps: tuple[Closable, ...] = (),
) -> Child:
    """Make a child that serves as long as the run goes on: the gateway, the compute thread, a watchdog."""
    return Child(
        actor=actor,
        restart=Restart.PERMANENT,
        max_restarts=max_restarts,
        within_seconds=within_seconds,
        make=make,
        keeps=keeps,
    )


def transient(
    actor: Runnable,
    *,
    max_restarts: int = 0,
    within_seconds: float = 60.0,
    make: Callable[[], Runnable] | None = None,
    keeps: tuple[Closable, ...] = (),
) -> Child:
    """Make a child whose return is its success: every box of the pipeline."""
    return Child(
        actor=actor,
        restart=Restart.TRANSIENT,
        max_restarts=max_restarts,
        within_seconds=within_seconds,
        make=make,
        keeps=keeps,
    )


def temporary(actor: Runnable, *, ends_with_input: bool = False) -> Child:
    """Make a child the run can do without: the terminal, a tracker."""
    return Child(actor=actor, restart=Restart.TEMPORARY, ends_with_input=ends_with_input)


class ChildState(StrEnum):
    """Where a child is in its life. DONE, FAILED and STOPPED are for good."""

    WAITING = "waiting"  # for the children before it
    STARTING = "starting"  # has not said yet that it is ready
    RUNNING = "running"
    RESTARTING = "restarting"  # as STARTING, after a failure
    DONE = "done"  # returned
    FAILED = "failed"
    STOPPED = "stopped"  # asked to end, and did


class ChildStatus(Struct, frozen=True, kw_only=True):
    """Supervisor -> /health. One child now; `error` is the last failure, forgiven or not."""

    state: ChildState
    restart: Restart
    restarts: int
    error: str | None


class RestartBudget:
    """At most `max_restarts` restarts within any `within_seconds`."""

    def __init__(self, max_restarts: int, within_seconds: float) -> None:
        self._max = max_restarts
        self._within = within_seconds
        self._spent: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Take one restart at the instant `now` (seconds, not decreasing); False if none is left."""
        while self._spent and self._spent[0] <= now - self._within:
            self._spent.popleft()
        if len(self._spent) >= self._max:
            return False
        self._spent.append(now)
        return True
