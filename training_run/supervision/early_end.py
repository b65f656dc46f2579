"""Ends of a run before its last step: the drain, its time limit, and causes for which sampling stops at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import anyio
import structlog

from training_run.supervision.supervisor import ChildState, Supervisor

log = structlog.get_logger(actor="pipeline")

FINAL = (ChildState.DONE, ChildState.FAILED, ChildState.STOPPED)


class EarlyEnd:
    """Ends the sampling of a run; the learner then trains on what it has, and the last checkpoint is written.

    The actor watches a drain: if no step has been completed for the time limit, sampling stops.
    causes: why sampling stopped; empty if it did not.
    """

    name = "drain limit"

    def __init__(
        self, supervisor: Supervisor, *, limit_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._supervisor, self._limit, self._clock = supervisor, limit_seconds, clock
        self._draining = anyio.Event()
        self._began = 0.0
        self._sampling: Sequence[str] = ()
        self._last_progress: Callable[[], float] = lambda: 0.0
        self._waiting_for: Callable[[], str] = str
        self.causes: list[str] = []

    def watch(
        self, sampling: Sequence[str], *, last_progress: Callable[[], float], waiting_for: Callable[[], str]
    ) -> None:
        """Set what is watched.

        sampling: names of the actors before the learner. last_progress: time of the last step, in seconds of the clock.
        waiting_for: what the learner waits for, in words.
        """
        self._sampling, self._last_progress, self._waiting_for = sampling, last_progress, waiting_for

    @property
    def is_draining(self) -> bool:
        """Whether the run ends after the groups in flight."""
        return self._draining.is_set()

    def drain_began(self) -> None:
        """Start the time limit of the drain."""
        self._began = self._clock()
        self._draining.set()

    def stop_sampling(self, cause: str) -> None:
        """Stop the actors before the learner; their groups are carried over to a resumed run. Logs the cause."""
        self.causes.append(cause)
        log.error("run_ends_early", cause=cause, exit_status=1)
        self._supervisor.abandon(self._sampling)

    async def run(self) -> None:
        """Wait for a drain, then for its time limit."""
        await self._draining.wait()
        while True:
            left = max(self._began, self._last_progress()) + self._limit - self._clock()
            if left <= 0:
                break
            await anyio.sleep(left)
        children = self._supervisor.status()
        if late := [name for name in self._sampling if children[name].state not in FINAL]:
            waits = f"the learner waits for {self._waiting_for() or 'groups'}; not ended: {', '.join(late)}"
            self.stop_sampling(f"no step in {self._limit:g} s of the drain (monitor.drain_seconds); {waits}")
