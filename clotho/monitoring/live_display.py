"""The live display: a screen that is redrawn twice per second, and the choice of the display of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import isfinite
from statistics import fmean
from typing import Literal

import structlog
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clotho.monitoring.display import (
    Display,
    NoDisplay,
    PlainDisplay,
    RunFacts,
    RunView,
    Sample,
    print_facts,
    rank_pieces,
    reward_pieces,
    server_pieces,
    zero_variance,
)
from clotho.monitoring.held_out_rows import rows
from clotho.monitoring.terminal_text import duration, memory, milliseconds, number, percent, share, size, terminal_text
from protocols.errors import visible
from protocols.finding import Finding
from protocols.summary import Gauges, RunGauges

log = structlog.get_logger(actor="monitor")

LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*#@"

LABEL_WIDTH = 10
PROMPT_LIMIT = 160
COMPLETION_LIMIT = 400
MAX_ALARMS, MAX_FACT = 4, 200
REDRAWS_PER_SECOND = 2

Kind = Literal["auto", "live", "plain", "none"]


def make_display(kind: Kind, console: Console, facts: RunFacts, gauges: Gauges) -> Display:
    """Return the display for `monitor.display`. `auto` is live on a terminal with cursor control, otherwise plain."""
    if kind == "auto":
        kind = "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
    match kind:
        case "live":
            return LiveDisplay(console, facts, gauges)
        case "plain":
            return PlainDisplay(console, facts, gauges)
        case _:
            return NoDisplay()


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Return a chart of at most `width` characters, scaled from the smallest to the largest value, oldest first.

    If there are more values than characters, consecutive values are averaged. Values that are not finite are skipped.
    """
    finite = [value for value in values if isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    parts = [finite[i * len(finite) // count : (i + 1) * len(finite) // count] for i in range(count)]
    means = [fmean(part) for part in parts]
    low, high = min(means), max(means)
    levels = ASCII_LEVELS if ascii_only else LEVELS
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)


class Screen:
    """One frame of the live display, most important rows first, because small windows cut the end."""

    def __init__(self, facts: RunFacts, view: RunView, gauges: RunGauges, seconds: float) -> None:
        self._facts, self._view, self._gauges, self._seconds = facts, view, gauges, seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the rows of the frame for the width of the console."""
        ascii_only = options.ascii_only
        width = max(8, options.max_width - LABEL_WIDTH - 1)
        rows: list[tuple[str, Text | Group]] = [
            ("progress", self._progress(width, ascii_only)),
            *(("alarm", self._alarm(finding, ascii_only)) for finding in self._gauges.findings[:MAX_ALARMS]),
            ("waiting", self._line(self._gauges.waiting_for or "-", ascii_only)),
            ("reward", self._rewards(width, ascii_only)),
            ("rewards", self._line(self._reward_parts(), ascii_only)),
            ("held-out", self._line(self._accuracy(), ascii_only)),
            ("speed", self._line(self._speed(), ascii_only)),
            ("update", self._line(self._update(), ascii_only)),
            ("groups", self._line(self._groups(), ascii_only)),
            ("queues", self._line(self._queues(), ascii_only)),
            *self._servers(ascii_only),
            *self._ranks(ascii_only),
            ("page", self._line(f"{self._facts.address}/" if self._facts.address else "-", ascii_only)),
        ]
        if self._view.sample is not None:
            rows.append(("sample", self._sample(self._view.sample, ascii_only)))
        table = Table.grid(padding=(0, 1, 0, 0), expand=False)
        table.add_column(style="bold", width=LABEL_WIDTH - 1, no_wrap=True)
        table.add_column(overflow="fold")
        for name, content in rows:
            table.add_row(Text(name), content)
        yield table

    def _progress(self, width: int, ascii_only: bool) -> Group:
        view, steps = self._view, self._facts.steps
        left = view.seconds_left
        if left is not None:
            left = max(0.0, left - (self._seconds - view.seconds))
        text = f"step {view.step}/{steps}  {duration(self._seconds)} elapsed, {duration(left)} left"
        bar = ProgressBar(total=steps, completed=view.step, width=min(width, 60))
        return Group(self._line(text, ascii_only), bar)

    def _rewards(self, width: int, ascii_only: bool) -> Text:
        rewards = self._view.rewards
        if not rewards:
            return self._line("-", ascii_only)
        text = Text(f"{rewards[-1]:.3f}  ", overflow="fold")
        text.append(sparkline(rewards, min(width - 16, 60), ascii_only=ascii_only), style="green")
        text.append(f"  {min(rewards):.2f} to {max(rewards):.2f}", style="dim")
        return text

    def _alarm(self, finding: Finding, ascii_only: bool) -> Text:
        text = f"{finding.name}: {visible(finding.fact, MAX_FACT)}; {finding.advice}"
        line = self._line(text, ascii_only)
        line.stylize("bold red" if finding.severity == "error" else "yellow")
        return line

    def _reward_parts(self) -> str:
        return "  ".join(reward_pieces(self._view.latest)) if self._view.latest else "-"

    def _accuracy(self) -> str:
        pieces = [f"{percent(report.accuracy)} (step {report.step})" for report in self._view.evaluations]
        for report in self._view.evaluations[-1:]:
            pieces += [f"{report.ungraded} ungraded"] if report.ungraded else []
            pieces += [f"{row.label} {row.text}" for row in rows(report.measures, functions=False)]
        return "  ".join(pieces) or "-"

    def _speed(self) -> str:
        latest, gauges = self._view.latest, self._gauges
        rate = number(latest["tokens_per_second"] if latest else None, ".0f")
        swap = milliseconds(gauges.swap_seconds_last)
        return (
            f"{rate} tokens/s  idle {number(gauges.decode_rate_idle, '.0f')}, "
            f"learning {number(gauges.decode_rate_learning, '.0f')}  {gauges.rows_running} sequences  "
            f"{size(gauges.tokens_sampled)} sampled  swap {swap}  peak {memory(gauges.peak_memory_bytes)}"
        )

    def _update(self) -> str:
        latest = self._view.latest
        if latest is None:
            return "-"
        return (
            f"version {latest['policy_version']}  loss {number(latest['loss'], '.4f')}  "
            f"kl {number(latest['kl'], '.4f')}  entropy {number(latest['entropy'])}  "
            f"clip fraction {number(latest['clip_fraction'])}  grad norm {number(latest['grad_norm'])}  "
            f"mismatch kl {number(latest['mismatch_kl'], '.1e')}  "
            f"staleness {number(latest['staleness/mean'], '.1f')} mean, {number(latest['staleness/max'], 'd')} max"
        )

    def _groups(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self._view.discarded.items()))
        text = f"{self._view.trained} trained  {sum(self._view.discarded.values())} discarded"
        text = f"{text} ({reasons})" if reasons else text
        latest = self._view.latest
        text = f"{text}  {share(latest['truncated_fraction'] if latest else None)} of the completions truncated"
        if latest is None or latest["curriculum/zero_variance_expected"] is None:
            return text
        return f"{text}  {zero_variance(latest)}"

    def _queues(self) -> str:
        depths = "  ".join(f"{queue.name} {queue.depth}/{queue.capacity}" for queue in self._gauges.queues)
        return f"{depths}  {self._gauges.api_requests} API requests".strip()

    def _servers(self, ascii_only: bool) -> list[tuple[str, Text]]:
        pieces = list(server_pieces(self._gauges.remote.servers, self._view.latest))
        return [("" if number else "servers", self._line(piece, ascii_only)) for number, piece in enumerate(pieces)]

    def _ranks(self, ascii_only: bool) -> list[tuple[str, Text]]:
        text = "  ".join(rank_pieces(self._view.latest))
        return [("learner", self._line(text, ascii_only))] if text else []

    def _sample(self, sample: Sample, ascii_only: bool) -> Group:
        head = f"reward {number(sample.reward)}  prompt: {terminal_text(sample.prompt, PROMPT_LIMIT)}"
        text = terminal_text(sample.completion, COMPLETION_LIMIT, ascii_only=ascii_only)
        return Group(self._line(head, ascii_only), Text(text, style="cyan", overflow="fold"))

    @staticmethod
    def _line(text: str, ascii_only: bool) -> Text:
        return Text(terminal_text(text, 1000, ascii_only=ascii_only), overflow="fold")


class LiveDisplay:
    """A screen at the bottom of the terminal, redrawn on a timer, because queues change between reports.

    An error while drawing is logged once; the screen then stays empty.
    """

    def __init__(
        self, console: Console, facts: RunFacts, gauges: Gauges, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._facts, self._gauges, self._clock = console, facts, gauges, clock
        self._view, self._shown_at = RunView(step=facts.resumed_from or 0), clock()
        self._broken = False
        self._live = Live(
            console=console,
            get_renderable=self.frame,
            refresh_per_second=REDRAWS_PER_SECOND,
            vertical_overflow="crop",
        )

    def start(self) -> None:
        """Write the facts and start the screen."""
        print_facts(self._console, self._facts)
        self._shown_at = self._clock()
        self._live.start()

    def show(self, view: RunView) -> None:
        """Set the state that the next redraw shows."""
        self._view, self._shown_at = view, self._clock()

    def close(self) -> None:
        """Stop redrawing; the last frame stays on the terminal."""
        self._live.stop()

    def frame(self) -> RenderableType:
        """Return the current frame. Also called from a thread of rich."""
        if self._broken:
            return Text("")
        try:
            seconds = self._view.seconds + self._clock() - self._shown_at
            return Screen(self._facts, self._view, self._gauges(), seconds)
        except Exception:
            self._broken = True
            log.warning("display_failed", exc_info=True)
            return Text("")
