"""Waiting for a state that other processes and tasks bring about."""

from __future__ import annotations

from collections.abc import Callable

import anyio

TIMEOUT_SECONDS = 60.0
POLL_SECONDS = 0.002
"""Time that the other process or task has for its work, between two looks."""


async def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition is true. Raises TimeoutError after `TIMEOUT_SECONDS`."""
    with anyio.fail_after(TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110 - another process tells nobody
            await anyio.sleep(POLL_SECONDS)
