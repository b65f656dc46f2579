"""Ends the run when something that is not an actor breaks."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future


class Guard:
    """Waits for a future that never has a result; its error is the guard's failure."""

    def __init__(self, name: str, broken: Future[None]) -> None:
        self.name = name
        self._broken = broken

    async def run(self) -> None:
        """Wait until it breaks. Being cancelled does not touch the future: others may still have to set it."""
        await asyncio.shield(asyncio.wrap_future(self._broken))
