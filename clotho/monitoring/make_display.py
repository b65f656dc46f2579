"""Which display a run gets."""

from __future__ import annotations

from typing import Literal

from rich.console import Console

from clotho.monitoring.display import Display, NoDisplay, RunFacts
from clotho.monitoring.live_display import LiveDisplay
from clotho.monitoring.plain_display import PlainDisplay
from protocols.summary import Gauges

Kind = Literal["auto", "live", "plain", "none"]


def make_display(kind: Kind, console: Console, facts: RunFacts, gauges: Gauges) -> Display:
    """`monitor.display`: `auto` is live on a terminal that can move its cursor, and plain lines elsewhere."""
    if kind == "auto":
        kind = "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
    match kind:
        case "live":
            return LiveDisplay(console, facts, gauges)
        case "plain":
            return PlainDisplay(console, facts)
        case _:
            return NoDisplay()
