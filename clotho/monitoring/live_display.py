"""The live display: redrawn on its own, for queues move between the reports too."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from clotho.monitoring.display import RunFacts, RunView
from clotho.monitoring.facts import print_facts
from clotho.monitoring.screen import Screen
from protocols.gauges import Gauges

log = structlog.get_logger(actor="monitor")

REDRAWN_PER_SECOND = 2


class LiveDisplay:
    """A screen of rich, on a terminal. An error in drawing is logged once and blanks the screen, nothing else."""

    def __init__(
        self, console: Console, facts: RunFacts, gauges: Gauges, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._facts, self._gauges, self._clock = console, facts, gauges, clock
        self._view, self._shown_at = RunView(), clock()
        self._broken = False
        self._live = Live(
            console=console,
            get_renderable=self.frame,
            refresh_per_second=REDRAWN_PER_SECOND,
            vertical_overflow="crop",
        )

    def start(self) -> None:
        """Write the facts, and take the bottom of the terminal."""
        print_facts(self._console, self._facts)
        self._shown_at = self._clock()
        self._live.start()

    def show(self, view: RunView) -> None:
        """Have the next redraw show this."""
        self._view, self._shown_at = view, self._clock()

    def close(self) -> None:
        """Leave the last frame on the terminal."""
        self._live.stop()

    def frame(self) -> RenderableType:
        """The screen now. Called from rich's own thread too."""
        if self._broken:
            return Text("")
        try:
            seconds = self._view.seconds + self._clock() - self._shown_at
            return Screen(self._facts.steps, self._view, self._gauges(), seconds)
        except Exception:
            self._broken = True
            log.warning("display_failed", exc_info=True)
            return Text("")
