"""The bridge from a thread's future to the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TypeVar

from protocols.errors import ClothoError

T = TypeVar("T")


class WorkCancelled(ClothoError, RuntimeError):
    """Work in another thread was cancelled by that thread, not by the one who waits for it."""


async def finish(future: concurrent.futures.Future[T]) -> T:
    """Wait, without blocking the loop, for a future that another thread resolves.

    When the waiting task is cancelled, so is the future: work that has not begun never will; of work that runs, only
    the result is given up. Returns or raises what the work did; WorkCancelled if somebody else cancelled it, since a
    CancelledError would look like the cancellation of the task that waits.
    """
    outcome = asyncio.wrap_future(future)
    try:
        await asyncio.wait([outcome])
    except asyncio.CancelledError:
        outcome.cancel()  # asyncio hands it on to the thread's future
        raise
    if outcome.cancelled():
        raise WorkCancelled("the work was cancelled in its own thread before it had a result")
    return outcome.result()
