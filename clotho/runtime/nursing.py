"""One child in its supervisor's care: the task that runs it, through all its lives, to its end for good."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup, TaskStatus

from clotho.runtime.actor import Runnable
from clotho.runtime.blame import culprit, in_words
from clotho.runtime.child import Child, ChildState, ChildStatus, Restart, RestartBudget
from clotho.runtime.ends import MailboxClosed

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
        elif isinstance(error, MailboxClosed) and not self._goes_on():
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
