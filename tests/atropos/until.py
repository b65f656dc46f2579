"""Waiting for what other processes and tasks do."""

from __future__ import annotations

from collections.abc import Callable

import anyio


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; about a minute at most."""
    for _ in range(6000):
        if condition():
            return
        await anyio.sleep(0.01)
    raise TimeoutError("it did not come about")
