"""The guard: what breaks outside the actors ends the run all the same."""

from __future__ import annotations

from concurrent.futures import Future

import anyio
import pytest

from clotho.runtime.watchdog import Guard
from tests.actors.boxes import cancelled_midway


async def test_what_breaks_is_the_guards_failure() -> None:
    """The error itself, so that the run ends with its name."""
    broken: Future[None] = Future()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, broken.set_exception, LookupError("a defect"))
        with pytest.raises(LookupError, match="a defect"):
            await Guard("decode engine", broken).run()


async def test_cancelled_it_leaves_the_future_to_those_who_set_it() -> None:
    """The compute thread reports into it also while the run is ending; a cancelled future would raise there."""
    broken: Future[None] = Future()
    await cancelled_midway(Guard("decode engine", broken).run)
    assert not broken.cancelled()
    broken.set_exception(LookupError("late"))
