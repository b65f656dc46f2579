"""Starts the actors in order, judges their failures, and stops them in reverse; as an OTP supervisor (one_for_one)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum

import anyio
from anyio.abc import TaskGroup

from clotho.runtime.blame import in_words
from clotho.runtime.child import Child, ChildState, ChildStatus, Restart
from clotho.runtime.nursing import Nursed
from protocols.errors import ActorError, ClothoError


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
        """Nobody waits any longer for a child of a run that is ending to become ready."""
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
