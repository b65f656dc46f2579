"""Waiting for the histories: metrics and rollouts are to reach a step before something is done about it."""

from __future__ import annotations

from contextlib import suppress

from anyio import move_on_after

from clotho.runtime.latest import Latest
from protocols.queues import EndOfStream

PATIENCE_SECONDS = 10.0


async def reached(recorded: Latest[int], step: int) -> bool:
    """Wait until the monitor has written the lines of `step`; False if `PATIENCE_SECONDS` were not enough.

    A monitor that has ended writes no more and is not waited for.
    """
    with suppress(EndOfStream), move_on_after(PATIENCE_SECONDS) as patience:
        await recorded.wait_until(lambda last: last >= step)
    return not patience.cancelled_caught
