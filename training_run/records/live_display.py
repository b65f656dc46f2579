"""The live display: a screen that is redrawn twice per second, and the choice of the display of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from statistics import fmean
from typing import Literal

import structlog
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protocols.errors import visible
from protocols.summary import Gauges, RunGauges
from training_run.attachment import shown_by_attachments
from training_run.records.display import (
    Display,
    NoDisplay,
    PlainDisplay,
    RunFacts,
    RunView,
    Sample,
    known,
    print_facts,
    reward_pieces,
    solved_pieces,
)
from training_run.records.held_out_rows import rows
from training_run.records.terminal_text import (
    duration,
    in_lines,
    memory,
    milliseconds,
    number,
    percent,
    share,
    size,
    terminal_text,
)

log = structlog.get_logger(actor="monitor")

LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*#@"

LABEL_WIDTH = 10
PIECE_LIMIT = 1000
PROMPT_LIMIT = 160
COMPLETION_LIMIT = 400
MIN_SAMPLE_LINES = 2
MAX_FACT, MAX_FINDING = 200, 500
ALWAYS_FULL = "prompts"
"""The queue that the prompter fills at once."""

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
    """One frame of the live display, most important rows first, because small windows cut the end.

    A row without a value has no line. The sample takes the lines that the other rows leave.
    """

    def __init__(self, facts: RunFacts, view: RunView, gauges: RunGauges, seconds: float) -> None:
        self._facts, self._view, self._gauges, self._seconds = facts, view, gauges, seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the rows of the frame for the width and the height of the console."""
        ascii_only = options.ascii_only
        width = max(8, options.max_width - LABEL_WIDTH - 1)
        table = Table.grid(padding=(0, 1, 0, 0), expand=False)
        table.add_column(style="bold", width=LABEL_WIDTH - 1, no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row(Text("progress"), self._progress(width, ascii_only))
        if self._gauges.findings:
            table.add_row(*self._finding(ascii_only))
        table.add_row(Text("reward"), self._rewards(width, ascii_only))
        for name, pieces in self._rows():
            text = "\n".join(
                in_lines((terminal_text(one, PIECE_LIMIT, ascii_only=ascii_only) for one in pieces), width)
            )
            if text:
                table.add_row(Text(name), Text(text, overflow="fold"))
        used = len(console.render_lines(table, options, pad=False))
        left = options.size.height - 1 - used
        if (sample := self._view.sample) is not None and left >= MIN_SAMPLE_LINES:
            table.add_row(Text("sample"), self._sample(sample, console, width, left, ascii_only))
        yield table

    def _rows(self) -> Iterator[tuple[str, Iterable[str]]]:
        """Yield the label and the pieces of each row of text."""
        view, gauges = self._view, self._gauges
        yield "rewards", reward_pieces(view.latest) if view.latest else ()
        yield "held-out", self._accuracy()
        yield "speed", self._speed()
        yield "update", self._update()
        yield "groups", self._groups()
        yield "waiting", () if view.has_ended else (f"for {gauges.waiting_for or 'nothing: an update is computed'}",)
        full = [queue for queue in gauges.queues if queue.depth >= queue.capacity > 1 and queue.name != ALWAYS_FULL]
        yield "full", (f"queue {queue.name} ({queue.capacity})" for queue in full)

    def _progress(self, width: int, ascii_only: bool) -> Group:
        view, steps = self._view, self._facts.steps
        text = f"step {view.step}/{steps}  {duration(self._seconds)} elapsed"
        if not view.has_ended:
            left = view.seconds_left
            left = None if left is None else max(0.0, left - (self._seconds - view.seconds))
            text = f"{text}, {duration(left)} left"
        bar = ProgressBar(total=steps, completed=view.step, width=min(width, 60))
        return Group(Text(terminal_text(text, PIECE_LIMIT, ascii_only=ascii_only), overflow="fold"), bar)

    def _rewards(self, width: int, ascii_only: bool) -> Text:
        rewards = self._view.rewards
        if not rewards:
            return Text("-")
        text = Text(f"{rewards[-1]:.3f}  ", overflow="fold")
        text.append(sparkline(rewards, min(width - 22, 60), ascii_only=ascii_only), style="green")
        text.append(f"  {min(rewards):.2f} to {max(rewards):.2f}", style="dim")
        return text

    def _finding(self, ascii_only: bool) -> tuple[Text, Text]:
        """Return the row of the findings: the first one, and the names of the others, which the log has."""
        first, *others = self._gauges.findings
        text = f"{first.name}: {visible(first.fact, MAX_FACT)}; {first.advice}"
        text += f" (also: {', '.join(finding.name for finding in others)})" if others else ""
        style = "bold red" if first.severity == "error" else "yellow"
        shown = Text(terminal_text(text, MAX_FINDING, ascii_only=ascii_only), style=style, overflow="fold")
        return Text(first.severity), shown

    def _accuracy(self) -> Iterator[str]:
        for report in self._view.evaluations:
            yield f"{percent(report.accuracy)} (step {report.step})"
        for report in self._view.evaluations[-1:]:
            if report.ungraded:
                yield f"{report.ungraded} ungraded"
            yield from (f"{row.label} {row.text}" for row in rows(report.measures, functions=False))

    def _speed(self) -> Iterator[str]:
        view, gauges = self._view, self._gauges
        mean = " over the run" if view.has_ended else ""
        yield f"{number(view.tokens_per_second, '.0f')} tokens/s{mean}"
        if gauges.decode_rate_idle is not None:
            yield f"decoding alone {number(gauges.decode_rate_idle, '.0f')}"
        if gauges.decode_rate_learning is not None:
            yield f"during updates {number(gauges.decode_rate_learning, '.0f')}"
        if not view.has_ended:
            yield f"{gauges.rows_running} sequences"
        yield f"{size(gauges.tokens_sampled)} sampled"
        if gauges.swap_seconds_last is not None:
            yield f"swap {milliseconds(gauges.swap_seconds_last)}"
        yield f"peak {memory(gauges.peak_memory_bytes)}"
        if gauges.api_requests:
            yield f"{gauges.api_requests} API requests"

    def _update(self) -> Iterator[str]:
        latest = self._view.latest
        if latest is None:
            return
        yield f"version {latest['policy_version']}"
        yield from known("loss", latest["loss"], ".4f")
        yield from known("kl", latest["kl"], ".4f")
        yield from known("entropy", latest["entropy"])
        if latest["clip_fraction"]:
            yield f"clipped low {number(latest['clip_fraction_low'])}, high {number(latest['clip_fraction_high'])}"
        yield from known("grad norm", latest["grad_norm"])
        yield from known("mismatch kl", latest["mismatch_kl"], ".1e")
        yield from known("staleness", latest["staleness/mean"], ".1f")

    def _groups(self) -> Iterator[str]:
        view, latest = self._view, self._view.latest
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(view.discarded.items()))
        discarded = f"{sum(view.discarded.values())} discarded"
        yield f"{view.trained} trained"
        yield f"{discarded} ({reasons})" if reasons else discarded
        if latest is None:
            return
        yield from solved_pieces(latest)
        if latest["truncated_fraction"] is not None:
            yield f"{share(latest['truncated_fraction'])} of the completions truncated"
        yield from shown_by_attachments(latest)

    def _sample(self, sample: Sample, console: Console, width: int, height: int, ascii_only: bool) -> Group:
        """Return the prompt on one line, and the begin of the completion on the other ones."""
        prompt = f"reward {number(sample.reward)}  prompt: {sample.prompt}"
        head = Text(terminal_text(prompt, PROMPT_LIMIT, ascii_only=ascii_only))
        head.truncate(width, overflow="crop" if ascii_only else "ellipsis")
        text = terminal_text(sample.completion, COMPLETION_LIMIT, ascii_only=ascii_only)
        return Group(head, *Text(text, style="cyan", overflow="fold").wrap(console, width)[: height - 1])


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
