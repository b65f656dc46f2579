"""Starts the actors in order, judges their failures, and stops them in reverse; as an OTP supervisor (one_for_one).

Who failed, and how to say it.

One child in its supervisor's care: the task that runs it, through all its lives, to its end for good.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

import anyio
from anyio.abc import TaskGroup, TaskStatus

from clotho.runtime.actor import Runnable
from clotho.runtime.child import Child, ChildState, ChildStatus, Restart, RestartBudget
from protocols.errors import ActorError, ClothoError
from protocols.queues import QueueClosed


def culprit(error: Exception) -> Exception:
    """Take the single error out of the groups in which task groups wrap it; a group of several stays one."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def in_words(error: Exception) -> str:
    """Write an error for one line. Errors of ours are sentences; of others, the type is half of the message."""
    return str(error) if isinstance(error, ClothoError) else f"{type(error).__name__}: {error}"


Report = Callable[[str, Exception], None]


class Nursed:
    """A running child. It decides over restarts; over the run, its supervisor does.

    goes_on: False once the run is ending: then nothing is restarted.
    report: hears of every failure that does not rise. on_end: called once, when the child has ended for good.
    failure: the error that rises, if one does.
    """

    def __init__(
        self, child: Child, *, goes_on: Callable[[], bool], report: Report, on_end: Callable[[Nursed], None]
    ) -> None:
        self.child = child
        self.failure: Exception | None = None
        self.ready, self.over = asyncio.Event(), asyncio.Event()
        self._goes_on, self._report, self._on_end = goes_on, report, on_end
        self._budget = RestartBudget(child.max_restarts, child.within_seconds)
        self._state, self._restarts, self._error = ChildState.WAITING, 0, ""
        self._task: asyncio.Task[object] | None = None
        self._scope: anyio.CancelScope | None = None
        self._asked: float | None = None  # when it was asked to end, monotonic seconds

    @property
    def status(self) -> ChildStatus:
        """What /health says of it."""
        return ChildStatus(
            state=self._state, restart=self.child.restart, restarts=self._restarts, error=self._error or None
        )

    def start(self, group: TaskGroup) -> None:
        """Begin its first life; `ready` is set when the next child may start, or this one is over."""
        self._scope = anyio.CancelScope()
        group.start_soon(self._nurse, name=self.child.name)

    def ask_to_end(self) -> None:
        """Cancel it, as anyio does: at its next await, again at each after that, except where it shields itself."""
        if self._scope is not None and self._asked is None:
            self._asked = time.monotonic()
            self._scope.cancel()

    async def let_finish(self, grace_seconds: float) -> None:
        """If it ends with its input, wait until it does. That it did not, within the grace, is reported."""
        if not self.child.ends_with_input or self._scope is None:
            return
        with anyio.move_on_after(grace_seconds):
            await self.over.wait()
        if not self.over.is_set() and self._asked is None:
            late = f"it had not read what was sent to it {grace_seconds:g} s after the others had ended"
            self._report(self.child.name, TimeoutError(late))

    async def end(self, grace_seconds: float) -> None:
        """Ask it to end and wait. Past the grace its shields are broken too, once, and that is reported.

        A child that swallows even that is waited for: a thread cannot be ended from within its own event loop.
        """
        if self._scope is None:
            return
        self.ask_to_end()
        asked = self._asked or 0.0
        with anyio.move_on_after(asked + grace_seconds - time.monotonic()):
            await self.over.wait()
        if not self.over.is_set() and self._task is not None:
            self._report(self.child.name, TimeoutError(f"its clean-up was cut off after {grace_seconds:g} s"))
            self._task.cancel()
            await self.over.wait()

    async def _nurse(self) -> None:
        self._task = asyncio.current_task()
        assert self._scope is not None
        try:
            with self._scope:
                await self._live()
        except Exception as error:
            self._fail(error)
        finally:
            if self._state not in (ChildState.DONE, ChildState.FAILED):
                self._state = ChildState.STOPPED
            for end in self.child.keeps:
                end.close()
            self.ready.set()
            self.over.set()
            self._on_end(self)

    async def _live(self) -> None:
        """Life after life, until the policy says that it was the last."""
        error = await self._one_life()
        while self._deserves_another(error):
            self._restarts += 1
            self._error = in_words(error or _returned())
            self._report(self.child.name, error or _returned())
            error = await self._one_life()
        self._conclude(error)

    async def _one_life(self) -> Exception | None:
        """Run one instance to its end. Returns its error, or None if it returned; raises only our own cancellation."""
        first = self._restarts == 0
        self._state = ChildState.STARTING if first else ChildState.RESTARTING
        try:
            await self._run(self.child.actor if first or self.child.make is None else self.child.make())
        except asyncio.CancelledError as error:
            if self._task is not None and self._task.cancelling():
                raise
            return _chained(RuntimeError("something it awaited was cancelled, but it was not"), error)
        except Exception as error:
            return culprit(error)
        return None

    async def _run(self, actor: Runnable) -> None:
        if "task_status" in inspect.signature(actor.run).parameters:
            await actor.run(task_status=_Handshake(self._is_ready))  # type: ignore[call-arg]
        else:
            self._is_ready()
            await actor.run()

    def _is_ready(self) -> None:
        self._state = ChildState.RUNNING
        self.ready.set()

    def _deserves_another(self, error: Exception | None) -> bool:
        if error is None and self.child.restart is not Restart.PERMANENT:
            return False
        if self.child.restart is Restart.TEMPORARY or not self._goes_on():
            return False
        return self._budget.spend(time.monotonic())

    def _conclude(self, error: Exception | None) -> None:
        """Settle how the last life ended."""
        if error is None and (self.child.restart is not Restart.PERMANENT or not self._goes_on()):
            self._state = ChildState.DONE
        elif isinstance(error, QueueClosed) and not self._goes_on():
            self._state = ChildState.STOPPED  # its reader was stopped before it, as the order demands
        elif error is not None and self.child.restart is Restart.TEMPORARY:
            self._state, self._error = ChildState.FAILED, in_words(error)
            self._report(self.child.name, error)
        else:
            self._fail(error or _returned())

    def _fail(self, error: Exception) -> None:
        self._state, self._error, self.failure = ChildState.FAILED, in_words(error), error


class _Handshake(TaskStatus[object]):
    """What an actor calls when it is ready; what it is given for it is not used."""

    def __init__(self, ready: Callable[[], None]) -> None:
        self._ready = ready

    def started(self, value: object = None) -> None:
        self._ready()


def _returned() -> RuntimeError:
    return RuntimeError("returned, but it must serve as long as the run goes on")


def _chained(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


class Ending(StrEnum):
    """How a run ended that did not fail."""

    FINISHED = "finished"  # every transient child returned by itself
    DRAINED = "drained"  # the same, after `drain`
    STOPPED = "stopped"  # `stop` cut it short


class Supervisor:
    """Runs children until every transient one has returned, a failure rises, or `stop`.

    on_failure: hears (name, error) of every failure that does not end the run: of a temporary child, of a child about
    to be restarted, and of those that fail while the run is ending.
    on_drain: makes the source of the flow end; what is in flight then finishes by itself.
    grace_seconds: how long each child that is stopped may take for a clean-up it shields from cancellation, and how
    long one that ends with its input may read on before it is stopped.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        on_failure: Callable[[str, Exception], None],
        on_drain: Callable[[], None],
        grace_seconds: float = 10.0,
    ) -> None:
        """Take the children in the order of their start; ValueError if two share a name or the grace is not above 0."""
        names = [child.name for child in children]
        if len(set(names)) < len(names):
            raise ValueError(f"every child needs a name of its own, not {', '.join(sorted(names))}")
        if grace_seconds <= 0:
            raise ValueError(f"grace_seconds must be above 0, not {grace_seconds}")
        self._nursed = [
            Nursed(child, goes_on=self._goes_on, report=self._report, on_end=self._child_ended) for child in children
        ]
        self._on_failure, self._on_drain, self._grace = on_failure, on_drain, grace_seconds
        self._ending: Ending | None = None
        self._failure: ActorError | None = None
        self._over = asyncio.Event()
        self._began = self._draining = False

    async def run(self) -> Ending:
        """Run once, to the end. Each child is started when those before it are ready.

        Whatever ends the run, children that still live are stopped in reverse order, one after the other (all at once
        after `stop`, or when this task is cancelled). If every transient child has returned, all that they wrote to has
        ended, and whoever ends with its input is granted the grace to read what was sent, before it is stopped.
        Without a transient child the run lasts until `stop`.
        Raises ActorError, naming the child and chained to its error, if one failed beyond its restart intensity; the
        exit status is the error's own if it has one.
        """
        if self._began:
            raise RuntimeError("a supervisor runs once: make another")
        self._began = True
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
        """Let the source end and everything in flight finish. The second time, or during an ending, does nothing."""
        if self._draining or not self._goes_on():
            return
        self._draining = True
        try:
            self._on_drain()
        except Exception as error:
            self._rise(ActorError(f"draining failed: {in_words(error)}"), error)

    def stop(self) -> None:
        """End at once: every child is cancelled now, and the grace runs for all of them together."""
        self._end(Ending.STOPPED)
        for nursed in reversed(self._nursed):
            nursed.ask_to_end()

    def status(self) -> dict[str, ChildStatus]:
        """Tell how each child is, by name, in the order of their start."""
        return {nursed.child.name: nursed.status for nursed in self._nursed}

    async def _start_in_order(self, group: TaskGroup) -> None:
        for nursed in self._nursed:
            if not self._goes_on():
                return
            nursed.start(group)
            await nursed.ready.wait()

    async def _stop_in_reverse(self) -> None:
        for nursed in reversed(self._nursed):
            if self._ending in (Ending.FINISHED, Ending.DRAINED):
                await nursed.let_finish(self._grace)
            await nursed.end(self._grace)

    def _child_ended(self, nursed: Nursed) -> None:
        error = nursed.failure
        if error is not None and self._goes_on():
            self._rise(ActorError(f"actor {nursed.child.name!r} failed: {in_words(error)}"), error)
        elif error is not None:
            self._report(nursed.child.name, error)
        elif self._pipeline_returned():
            self._end(Ending.DRAINED if self._draining else Ending.FINISHED)

    def _pipeline_returned(self) -> bool:
        states = [n.status.state for n in self._nursed if n.child.restart is Restart.TRANSIENT]
        return bool(states) and all(state is ChildState.DONE for state in states)

    def _goes_on(self) -> bool:
        return self._ending is None and self._failure is None

    def _rise(self, failure: ActorError, cause: Exception) -> None:
        """The first failure is the culprit; later ones are noted on it."""
        failure.__cause__ = cause
        if isinstance(cause, ClothoError):
            failure.exit_status = cause.exit_status
        if self._failure is None:
            self._failure = failure
        else:
            self._failure.add_note(str(failure))
        self._wake()

    def _end(self, ending: Ending) -> None:
        if self._goes_on():
            self._ending = ending
        self._wake()

    def _wake(self) -> None:
        """NullSampleLog waits any longer for a child of a run that is ending to become ready."""
        self._over.set()
        for nursed in self._nursed:
            nursed.ready.set()

    def _report(self, name: str, error: Exception) -> None:
        if self._failure is not None:
            self._failure.add_note(f"while the run was ending, actor {name!r} failed too: {in_words(error)}")
        try:
            self._on_failure(name, error)
        except Exception as deaf:
            self._rise(ActorError(f"the failure of actor {name!r} could not be reported: {in_words(deaf)}"), deaf)
