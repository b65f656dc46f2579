"""Runs actors: starts each when those before it are ready, restarts by policy, and stops them in reverse order.

The restart types are those of an Erlang/OTP supervisor with the strategy one_for_one.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import Protocol

import anyio
from anyio.abc import TaskGroup, TaskStatus
from msgspec import Struct

from protocols.errors import ActorError, ClothoError, error_text
from protocols.queues import Closable, QueueClosed

FIRST_SECONDS, FACTOR = 0.05, 1.5
"""Seconds of the first pause of a `Backoff`, and the factor of the others."""


class Runnable(Protocol):
    """Anything that the supervisor can run.

    If `run` takes a keyword `task_status` (anyio.abc.TaskStatus), the children after it start once it has called
    `task_status.started()`.
    """

    @property
    def name(self) -> str:
        """Name in errors, logs and /health; unique within a run."""

    async def run(self) -> None:
        """Work until the input ends, then return. An exception is a failure."""


class RestartPolicy(Struct, frozen=True, kw_only=True):
    """How often to restart what has ended, and after which pause.

    max_restarts: number of restarts in a row; a run of at least `stable_seconds` resets the count.
    first_pause_seconds: doubled with each restart in a row, up to `longest_pause_seconds`.
    """

    max_restarts: int = 0
    stable_seconds: float = 60.0
    first_pause_seconds: float = 0.0
    longest_pause_seconds: float = 8.0


class RestartCounter:
    """Counts restarts in a row under a policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.in_a_row = 0

    def next_pause(self, ran_seconds: float) -> float | None:
        """Seconds to wait before the next restart, after a run of `ran_seconds`; None if no restart is left."""
        policy = self._policy
        if ran_seconds >= policy.stable_seconds:
            self.in_a_row = 0
        self.in_a_row += 1
        if self.in_a_row > policy.max_restarts:
            return None
        return min(policy.first_pause_seconds * 2.0 ** (self.in_a_row - 1), policy.longest_pause_seconds)


class Backoff:
    """Exponential backoff: `FIRST_SECONDS`, multiplied by `FACTOR` after each delay, up to `max_seconds`."""

    def __init__(self, *, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._next = min(FIRST_SECONDS, max_seconds)

    def next_seconds(self) -> float:
        """Return the next delay."""
        delay, self._next = self._next, min(self._next * FACTOR, self._max_seconds)
        return delay

    def reset(self) -> None:
        """Start again with the first delay."""
        self._next = min(FIRST_SECONDS, self._max_seconds)


class Restart(StrEnum):
    """When a child that ended is restarted.

    PERMANENT: whenever it ends while the run goes on. It must not return by itself.
    TRANSIENT: if it failed. The run lasts until every transient child has returned.
    TEMPORARY: never. A failure is reported and does not end the run.
    """

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


class Child(Struct, frozen=True, kw_only=True, eq=False):
    """Wiring -> supervisor. One actor, and when to restart it.

    policy: limits the restarts of a permanent or transient child.
    held_ends: further ends of the actor's queues. They stay open while the actor restarts, because a failed actor
        closes its own ends, and are closed when it has ended.
    ends_with_input: a temporary child that returns when its inbox ends. At the end of the run it gets the grace period
        to read its inbox; other temporary children are cancelled.
    on_return: called when the actor has returned without an error and is not restarted.
    """

    actor: Runnable
    restart: Restart
    policy: RestartPolicy = RestartPolicy()
    held_ends: tuple[Closable, ...] = ()
    ends_with_input: bool = False
    on_return: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a contradiction."""
        if self.restart is Restart.TEMPORARY and self.policy.max_restarts:
            raise ValueError(f"child {self.name!r} is temporary: max_restarts must be 0")
        if self.ends_with_input and self.restart is not Restart.TEMPORARY:
            raise ValueError(f"child {self.name!r} is {self.restart}: ends_with_input requires a temporary child")

    @property
    def name(self) -> str:
        """The actor's name."""
        return self.actor.name


def permanent(actor: Runnable, policy: RestartPolicy = RestartPolicy()) -> Child:  # noqa: B008  (immutable)
    """A child that runs as long as the run goes on, such as the HTTP server."""
    return Child(actor=actor, restart=Restart.PERMANENT, policy=policy)


def transient(actor: Runnable, policy: RestartPolicy = RestartPolicy()) -> Child:  # noqa: B008  (immutable)
    """A child whose return is its success, such as the learner."""
    return Child(actor=actor, restart=Restart.TRANSIENT, policy=policy)


def temporary(actor: Runnable, *, ends_with_input: bool = False) -> Child:
    """A child that the run does not depend on, such as the monitor."""
    return Child(actor=actor, restart=Restart.TEMPORARY, ends_with_input=ends_with_input)


class ChildState(StrEnum):
    """State of a child. DONE, FAILED and STOPPED are final."""

    WAITING = "waiting"  # for earlier children
    STARTING = "starting"  # not ready yet
    RUNNING = "running"
    RESTARTING = "restarting"  # not ready yet, after a failure
    DONE = "done"  # returned
    FAILED = "failed"
    STOPPED = "stopped"  # cancelled


class ChildStatus(Struct, frozen=True, kw_only=True):
    """Supervisor -> /health and /metrics. error: the last failure, even if the child was restarted."""

    state: ChildState
    restart: Restart
    restarts: int
    error: str | None


def describe_error(error: Exception) -> str:
    """Format an error on one line; the type is included unless the error is a ClothoError."""
    return error_text(error) if isinstance(error, ClothoError) else f"{type(error).__name__}: {error_text(error)}"


def _single_error(error: Exception) -> Exception:
    """Unwrap exception groups with one member, which task groups raise."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class _SupervisedTask:
    """The task that runs one child, with its restarts. The supervisor decides about the run.

    failure: the error that ends the run, if any. abandoned: the run does not wait for the child's return.
    ready: set when the next child may start. over: set when the child has ended.
    """

    def __init__(
        self,
        child: Child,
        *,
        is_running: Callable[[], bool],
        report: Callable[[str, Exception], None],
        on_end: Callable[[_SupervisedTask], None],
    ) -> None:
        self.child = child
        self.failure: Exception | None = None
        self.abandoned = False
        self.ready, self.over = asyncio.Event(), asyncio.Event()
        self._is_running, self._report, self._on_end = is_running, report, on_end
        self._counter = RestartCounter(child.policy)
        self._state, self._restarts, self._error = ChildState.WAITING, 0, ""
        self._task: asyncio.Task[object] | None = None
        self._scope: anyio.CancelScope | None = None
        self._cancelled_at: float | None = None  # monotonic seconds

    @property
    def status(self) -> ChildStatus:
        """State, restarts and last error of the child."""
        return ChildStatus(
            state=self._state, restart=self.child.restart, restarts=self._restarts, error=self._error or None
        )

    def start(self, group: TaskGroup) -> None:
        """Start the task."""
        self._scope = anyio.CancelScope()
        group.start_soon(self._supervise, name=self.child.name)

    def cancel(self) -> None:
        """Request cancellation. Shielded scopes in the actor finish first."""
        if self._scope is not None and self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
            self._scope.cancel()

    async def wait_for_input_end(self, grace_seconds: float) -> None:
        """Wait until a child that ends with its input has ended; report it if it exceeds the grace period."""
        if not self.child.ends_with_input or self._scope is None:
            return
        with anyio.move_on_after(grace_seconds):
            await self.over.wait()
        if not self.over.is_set() and self._cancelled_at is None:
            late = f"did not finish reading its inbox within {grace_seconds:g} s after the other actors had ended"
            self._report(self.child.name, TimeoutError(late))

    async def stop(self, grace_seconds: float) -> None:
        """Cancel the child and wait for its end. After the grace period, shielded scopes are cancelled and reported."""
        if self._scope is None:
            return
        self.cancel()
        cancelled_at = self._cancelled_at or 0.0
        with anyio.move_on_after(cancelled_at + grace_seconds - time.monotonic()):
            await self.over.wait()
        if not self.over.is_set() and self._task is not None:
            self._report(self.child.name, TimeoutError(f"its clean-up was cut off after {grace_seconds:g} s"))
            self._task.cancel()
            await self.over.wait()

    async def _supervise(self) -> None:
        self._task = asyncio.current_task()
        assert self._scope is not None
        try:
            with self._scope:
                await self._run_with_restarts()
        except Exception as error:
            self._fail(error)
        finally:
            if self._state not in (ChildState.DONE, ChildState.FAILED):
                self._state = ChildState.STOPPED
            for end in self.child.held_ends:
                end.close()
            if self._state is ChildState.DONE and self.child.on_return is not None:
                self.child.on_return()
            self.ready.set()
            self.over.set()
            self._on_end(self)

    async def _run_with_restarts(self) -> None:
        while True:
            if not self._restarts:
                self._state = ChildState.STARTING
            began = time.monotonic()
            error = await self._run_once()
            pause = self._next_pause(error, time.monotonic() - began)
            if pause is None:
                return self._conclude(error)
            self._restarts += 1
            self._state = ChildState.RESTARTING
            self._error = describe_error(error or _returned())
            self._report(self.child.name, error or _returned())
            await anyio.sleep(pause)

    async def _run_once(self) -> Exception | None:
        """Run the actor. Returns its error, or None if it returned; raises only if this task is cancelled."""
        actor = self.child.actor
        try:
            if "task_status" in inspect.signature(actor.run).parameters:
                await actor.run(task_status=_ReadySignal(self._set_ready))  # type: ignore[call-arg]
            else:
                self._set_ready()
                await actor.run()
        except asyncio.CancelledError as error:
            if self._task is not None and self._task.cancelling():
                raise
            failure = RuntimeError("an awaited task was cancelled, but the actor was not")
            failure.__cause__ = error
            return failure
        except Exception as error:
            return _single_error(error)
        return None

    def _set_ready(self) -> None:
        self._state = ChildState.RUNNING
        self.ready.set()

    def _next_pause(self, error: Exception | None, ran_seconds: float) -> float | None:
        """Seconds before a restart; None for no restart."""
        if error is None and self.child.restart is not Restart.PERMANENT:
            return None
        if self.child.restart is Restart.TEMPORARY or not self._is_running():
            return None
        return self._counter.next_pause(ran_seconds)

    def _conclude(self, error: Exception | None) -> None:
        """Set the final state."""
        if error is None and (self.child.restart is not Restart.PERMANENT or not self._is_running()):
            self._state = ChildState.DONE
        elif isinstance(error, QueueClosed) and not self._is_running():
            self._state = ChildState.STOPPED  # its reader was stopped before it
        elif error is not None and self.child.restart is Restart.TEMPORARY:
            self._state, self._error = ChildState.FAILED, describe_error(error)
            self._report(self.child.name, error)
        else:
            self._fail(error or _returned())

    def _fail(self, error: Exception) -> None:
        self._state, self._error, self.failure = ChildState.FAILED, describe_error(error), error


class _ReadySignal(TaskStatus[object]):
    """The `task_status` of an actor; the value of `started` is ignored."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready

    def started(self, value: object = None) -> None:
        """Tell the supervisor that the child is ready."""
        self._on_ready()


def _returned() -> RuntimeError:
    return RuntimeError("returned, but it must run as long as the run goes on")


class Ending(StrEnum):
    """How a run ended, unless it failed."""

    FINISHED = "finished"  # every transient child returned
    DRAINED = "drained"  # the same, after `drain`
    STOPPED = "stopped"  # by `stop`


class Supervisor:
    """Runs children until every transient one has returned, one fails, or `stop` is called.

    on_failure: called with (name, error) for each failure that does not end the run.
    grace_seconds: how long a stopped child may take for clean-up that it shields from cancellation, and how long a
        child that ends with its input may continue to read.
    """

    def __init__(self, *, on_failure: Callable[[str, Exception], None], grace_seconds: float = 10.0) -> None:
        """Raises ValueError if the grace period is not above 0."""
        if grace_seconds <= 0:
            raise ValueError(f"grace_seconds must be above 0, not {grace_seconds}")
        self._tasks: list[_SupervisedTask] = []
        self._on_failure, self._grace = on_failure, grace_seconds
        self._on_drain: Callable[[], None] | None = None
        self._ending: Ending | None = None
        self._failure: ActorError | None = None
        self._over = asyncio.Event()
        self._draining = False

    async def run(self, children: Sequence[Child], *, on_drain: Callable[[], None]) -> Ending:
        """Run the children once, and return how the run ended. Each child starts when those before it are ready.

        on_drain: called once by `drain`; makes the source of the flow end, so that the other actors finish.

        At the end, the remaining children are stopped in reverse order, one after the other; after `stop`, or if this
        task is cancelled, all at once. If every transient child has returned, children that end with their input first
        get the grace period to read their inbox. Without a transient child the run lasts until `stop`.

        Raises ActorError if a child failed and has no restart left. The error names the child, is chained to the
        child's error, and has its exit status. Raises ValueError if two children have the same name.
        """
        if self._tasks:
            raise RuntimeError("a supervisor runs once")
        names = [child.name for child in children]
        if len(set(names)) < len(names):
            raise ValueError(f"the names of children must be unique: {', '.join(sorted(names))}")
        self._on_drain = on_drain
        if self._draining:
            self._drain_source(on_drain)
        self._tasks = [
            _SupervisedTask(child, is_running=self._is_running, report=self._report, on_end=self._child_ended)
            for child in children
        ]
        async with anyio.create_task_group() as group:
            try:
                await self._start_in_order(group)
                await self._over.wait()
            except asyncio.CancelledError:
                self.stop()
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop_in_reverse()
        if self._failure is not None:
            raise self._failure
        assert self._ending is not None
        return self._ending

    def drain(self) -> None:
        """Make the source end; the run ends when everything in flight has finished. Only the first call has effect."""
        if self._draining or not self._is_running():
            return
        self._draining = True
        if self._on_drain is not None:
            self._drain_source(self._on_drain)

    def _drain_source(self, on_drain: Callable[[], None]) -> None:
        try:
            on_drain()
        except Exception as error:
            self._raise_later(ActorError(f"draining failed: {describe_error(error)}"), error)

    def stop(self) -> None:
        """Cancel every child now; all share one grace period."""
        self._end(Ending.STOPPED)
        for task in reversed(self._tasks):
            task.cancel()

    def abandon(self, names: Collection[str]) -> None:
        """Cancel these children; the run goes on without them, and ends when the other transient children return."""
        for task in self._tasks:
            if task.child.name in names and not task.over.is_set():
                task.abandoned = True
                task.cancel()

    def status(self) -> dict[str, ChildStatus]:
        """Status of each child, in start order."""
        return {task.child.name: task.status for task in self._tasks}

    async def _start_in_order(self, group: TaskGroup) -> None:
        for task in self._tasks:
            if not self._is_running():
                return
            task.start(group)
            await task.ready.wait()

    async def _stop_in_reverse(self) -> None:
        for task in reversed(self._tasks):
            if self._ending in (Ending.FINISHED, Ending.DRAINED):
                await task.wait_for_input_end(self._grace)
            await task.stop(self._grace)

    def _child_ended(self, task: _SupervisedTask) -> None:
        error = task.failure
        if error is not None and self._is_running():
            self._raise_later(ActorError(f"actor {task.child.name!r} failed: {describe_error(error)}"), error)
        elif error is not None:
            self._report(task.child.name, error)
        elif self._flow_has_ended():
            self._end(Ending.DRAINED if self._draining else Ending.FINISHED)

    def _flow_has_ended(self) -> bool:
        flow = [task for task in self._tasks if task.child.restart is Restart.TRANSIENT]
        return bool(flow) and all(
            task.status.state is ChildState.DONE or (task.abandoned and task.over.is_set()) for task in flow
        )

    def _is_running(self) -> bool:
        return self._ending is None and self._failure is None

    def _raise_later(self, failure: ActorError, cause: Exception) -> None:
        """End the run with a failure. `run` raises the first one; later ones become notes on it."""
        failure.__cause__ = cause
        if isinstance(cause, ClothoError):
            failure.exit_status = cause.exit_status
        if self._failure is None:
            self._failure = failure
        else:
            self._failure.add_note(str(failure))
        self._wake()

    def _end(self, ending: Ending) -> None:
        if self._is_running():
            self._ending = ending
        self._wake()

    def _wake(self) -> None:
        """Wake `run`, also if it waits for a child to become ready."""
        self._over.set()
        for task in self._tasks:
            task.ready.set()

    def _report(self, name: str, error: Exception) -> None:
        if self._failure is not None:
            self._failure.add_note(f"while the run was ending, actor {name!r} failed too: {describe_error(error)}")
        try:
            self._on_failure(name, error)
        except Exception as broken:
            failure = ActorError(f"the failure of actor {name!r} could not be reported: {describe_error(broken)}")
            self._raise_later(failure, broken)
