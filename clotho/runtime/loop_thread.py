"""One thread, the event loop's, touches the runtime. Waking a coroutine from another would be lost or late."""

from __future__ import annotations

import threading


class LoopThread:
    """Remembers the first thread that comes by, and refuses every other."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._thread: int | None = None

    def check(self) -> None:
        """Raise RuntimeError in any thread but the first one that called this."""
        here = threading.get_ident()
        if self._thread is None:
            self._thread = here
        elif self._thread != here:
            raise RuntimeError(
                f"{self._what} belongs to the event loop's thread, but thread {threading.current_thread().name!r} "
                "used it; hand the call over with loop.call_soon_threadsafe"
            )
