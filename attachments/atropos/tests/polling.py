"""Waiting for a state that other processes and tasks bring about."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.lowlevel import checkpoint

TIMEOUT_SECONDS = 60.0


async def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition is true. Raises TimeoutError after `TIMEOUT_SECONDS`."""
    with anyio.fail_after(TIMEOUT_SECONDS):
        while not condition():
            await checkpoint()
