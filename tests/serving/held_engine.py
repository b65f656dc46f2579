"""An engine that stands still when a number of rows are running."""

from __future__ import annotations

import threading

from clotho.inference.engine import DecodeEngine


class HeldEngine:
    """Holds the thread of an engine after the first step with `rows` running rows.

    reached: set by then. release: ends the hold.
    """

    def __init__(self, engine: DecodeEngine, rows: int) -> None:
        self.reached, self.release = threading.Event(), threading.Event()
        tick = engine.tick

        def held() -> int:
            sampled = tick()
            if engine.running >= rows and not self.reached.is_set():
                self.reached.set()
                assert self.release.wait(60)
            return sampled

        engine.tick = held  # type: ignore[method-assign]
