"""Progress of a command that works for minutes: its phases on lines of a console, and how much of its time is left."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console

from training_run.records.terminal_text import print_line

SECONDS = 10.0
"""Time after which a line says what is still being done."""


class Progress:
    """Says what is being done, and what was cut off because the time was spent.

    A phase has a line at its begin and one every `SECONDS`, because the first completions of a language model take
    minutes. The time begins with `start`. Used in the event loop; `left` from any thread.
    """

    def __init__(self, console: Console, seconds: float) -> None:
        self._console, self._seconds = console, seconds
        self._began = self._started = time.monotonic()
        self._phase = self._detail = ""
        self._timer: asyncio.TimerHandle | None = None
        self.cut_off: list[str] = []

    def phase(self, text: str) -> None:
        """Begin a phase."""
        self._phase, self._detail = text, ""
        self._say()

    def note(self, detail: str) -> None:
        """Let the next line of the phase say how far it is."""
        self._detail = f": {detail}"

    def start(self) -> None:
        """Let the time begin."""
        self._started = time.monotonic()

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._started + self._seconds - time.monotonic())

    def reached(self, what: str) -> bool:
        """Return whether there is time left for a phase, and begin it; otherwise note that it is cut off."""
        if self.left:
            self.phase(what)
            return True
        self.cut_off.append(what)
        return False

    def _say(self) -> None:
        self.stop()
        print_line(self._console, f"doctor {time.monotonic() - self._began:4.0f} s  {self._phase}{self._detail}")
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self._say)

    def stop(self) -> None:
        """Say nothing more."""
        if self._timer is not None:
            self._timer.cancel()
