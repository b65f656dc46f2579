"""Ends the run when something that is not an actor breaks."""

from __future__ import annotations

from concurrent.futures import Future

from actors.runtime.futures import finish


class Guard:
    """Waits for a future that never has a result; its error is the guard's failure."""

    def __init__(self, name: str, broken: Future[None]) -> None:
        self.name = name
        self._broken = broken

    async def run(self) -> None:
        """Wait until it breaks."""
        await finish(self._broken)
