"""The live display: redrawn on its own, for queues move between the reports too.

A curve in one line of text.

The live screen, sampled from the view and the gauges: most important first, for small windows cut it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import isfinite
from statistics import fmean

import structlog
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clotho.monitoring.display import RunFacts, RunView, Sample
from clotho.monitoring.plain_display import print_facts
from clotho.monitoring.terminal_text import duration, memory, milliseconds, number, percent, size, visible
from protocols.summary import Gauges, RunGauges

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"


def curve(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """At most `width` characters whose height is the value, from the smallest to the largest; oldest first.

    More values than characters are averaged in equal parts. Values that are not finite are left out.
    """
    finite = [value for value in values if isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    parts = [finite[i * len(finite) // count : (i + 1) * len(finite) // count] for i in range(count)]
    means = [fmean(part) for part in parts]
    low, high = min(means), max(means)
    levels = ASCII if ascii_only else BLOCKS
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)


LABEL = 10
"""Columns of the labels on the left."""

PROMPT_LIMIT = 160
COMPLETION_LIMIT = 400


class Screen:
    """One frame. Rich asks for its lines once the width is known."""

    def __init__(self, steps: int, view: RunView, gauges: RunGauges, clock_seconds: float) -> None:
        self._steps, self._view, self._gauges, self._seconds = steps, view, gauges, clock_seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The frame's lines; each fits the width, and nothing in it is markup."""
        plain = options.ascii_only
        width = max(8, options.max_width - LABEL - 1)
        rows: list[tuple[str, Text | Group]] = [
            ("progress", self._progress(width, plain)),
            ("reward", self._rewards(width, plain)),
            ("held-out", self._line(self._accuracy(), plain)),
            ("speed", self._line(self._speed(), plain)),
            ("update", self._line(self._update(), plain)),
            ("groups", self._line(self._groups(), plain)),
            ("queues", self._line(self._queues(), plain)),
        ]
        if self._view.sample is not None:
            rows.append(("sample", self._sample(self._view.sample, plain)))
        table = Table.grid(padding=(0, 1, 0, 0), expand=False)
        table.add_column(style="bold", width=LABEL - 1, no_wrap=True)
        table.add_column(overflow="fold")
        for name, content in rows:
            table.add_row(Text(name), content)
        yield table

    def _progress(self, width: int, plain: bool) -> Group:
        view, steps = self._view, self._steps
        left = view.seconds_left(steps)
        if left is not None:
            left = max(0.0, left - (self._seconds - view.seconds))
        text = f"step {view.step}/{steps}  {duration(self._seconds)} elapsed, {duration(left)} left"
        bar = ProgressBar(total=steps, completed=view.step, width=min(width, 60))
        return Group(self._line(text, plain), bar)

    def _rewards(self, width: int, plain: bool) -> Text:
        rewards = self._view.rewards
        if not rewards:
            return self._line("-", plain)
        sampled = curve(rewards, min(width - 16, 60), ascii_only=plain)
        text = Text(f"{rewards[-1]:.3f}  ", overflow="fold")
        text.append(sampled, style="green")
        text.append(f"  {min(rewards):.2f} to {max(rewards):.2f}", style="dim")
        return text

    def _accuracy(self) -> str:
        found = [f"{percent(report.accuracy)} (step {report.step})" for report in self._view.evaluations]
        return "  ".join(found) or "-"

    def _speed(self) -> str:
        latest, gauges = self._view.latest, self._gauges
        rate = number(latest.tokens_per_second if latest else None, ".0f")
        swap = milliseconds(gauges.swap_seconds_last)
        return (
            f"{rate} tokens/s  idle {number(gauges.decode_rate_idle, '.0f')}, "
            f"learning {number(gauges.decode_rate_learning, '.0f')}  {gauges.rows_running} rows  "
            f"{size(gauges.tokens_sampled)} sampled  swap {swap}  {memory(gauges.peak_memory_bytes)} peak"
        )

    def _update(self) -> str:
        latest = self._view.latest
        if latest is None:
            return "-"
        return (
            f"version {latest.policy_version}  loss {number(latest.loss, '.4f')}  kl {number(latest.kl, '.4f')}  "
            f"entropy {number(latest.entropy)}  clipped {number(latest.clip_fraction)}  "
            f"norm {number(latest.grad_norm)}  mismatch {number(latest.mismatch_kl, '.1e')}  "
            f"staleness {number(latest.staleness_mean, '.1f')} mean, {latest.staleness_max or 0} most"
        )

    def _groups(self) -> str:
        lost = ", ".join(f"{count} {reason}" for reason, count in sorted(self._view.discarded.items()))
        return f"{self._view.trained} trained  {sum(self._view.discarded.values())} discarded" + (
            f" ({lost})" if lost else ""
        )

    def _queues(self) -> str:
        depths = "  ".join(f"{box.name} {box.depth}/{box.capacity}" for box in self._gauges.mailboxes)
        return f"{depths}  {self._gauges.api_requests} API requests".strip()

    def _sample(self, sample: Sample, plain: bool) -> Group:
        head = f"reward {number(sample.reward)}  asked: {visible(sample.prompt, PROMPT_LIMIT)}"
        body = Text(visible(sample.completion, COMPLETION_LIMIT, ascii_only=plain), style="cyan", overflow="fold")
        return Group(self._line(head, plain), body)

    @staticmethod
    def _line(text: str, plain: bool) -> Text:
        return Text(visible(text, 1000, ascii_only=plain), overflow="fold")


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
