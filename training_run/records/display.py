"""Displays: what a run shows on the terminal, as a redrawn screen or as plain lines without cursor movements."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import isfinite
from statistics import fmean
from typing import Any, Literal

import structlog
from msgspec import Struct
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clotho.extension import Door
from protocols.compute import MachineDescription, PolicyDescription
from protocols.errors import visible
from protocols.evaluation import EvalReport
from protocols.step import StepReport
from protocols.summary import Gauges, RunGauges
from training_run.records.held_out_rows import accuracy_text, rows
from training_run.records.metrics import SOLVED_METRICS, MetricsLine
from training_run.records.terminal_text import (
    duration,
    in_lines,
    memory,
    milliseconds,
    number,
    percent,
    print_line,
    share,
    size,
    terminal_text,
    wrapped,
)

log = structlog.get_logger(actor="monitor")

SECONDS_BETWEEN_LINES = 2.0
"""Minimum time between two steps that the plain display writes."""

REMINDER_SECONDS = 30.0
"""Time without a line after which the plain display writes what the run waits for."""

LABEL_WIDTH = 9
"""Width of the labels of the facts."""

LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*#@"

ROW_LABEL_WIDTH = 10
PIECE_LIMIT = 1000
PROMPT_LIMIT = 160
COMPLETION_LIMIT = 400
MIN_SAMPLE_LINES = 2
MAX_FACT, MAX_FINDING = 200, 500
ALWAYS_FULL = "prompts"
"""The queue that the prompter fills at once."""

REDRAWS_PER_SECOND = 2

Kind = Literal["auto", "live", "plain", "none"]

SHOWN: Door[[Mapping[str, Any]], Iterable[str]] = Door("attachment.shown")
"""Returns what both displays show of a line of metrics.jsonl."""


class Sample(Struct, frozen=True, kw_only=True):
    """One completion of the latest batch, for the live display."""

    prompt: str
    answer: str
    completion: str
    reward: float | None


def sample(report: StepReport) -> Sample | None:
    """Return one completion of a batch; its position in the group changes with the step. None without completions."""
    for group in report.ended:
        if group.completions:
            i, problem = report.step % len(group.completions), group.prompt.problem
            reward = group.rewards[i] if group.rewards else None
            text = group.completions[i].text
            return Sample(prompt=problem.prompt, answer=problem.answer, completion=text, reward=reward)
    return None


class RunFacts(Struct, frozen=True, kw_only=True):
    """Constant facts of a run, for the startup screen.

    compute_path: what computes decoding and training. address: URL of the HTTP API; None if it is off. steps: of the
    whole run. resumed_from: step of the checkpoint that the run resumed from; 0 without a checkpoint; None for a new
    run. estimated_memory: estimated peak memory of arrays in bytes. system_message: of every prompt; empty: none.
    rewards: weight, name and expected format of every reward; empty if environments compute rewards.
    """

    profile: str
    model: str
    machine: MachineDescription
    compute_path: str
    policy: PolicyDescription
    address: str | None
    run_dir: str
    steps: int
    resumed_from: int | None = None
    estimated_memory: int
    system_message: str = ""
    rewards: tuple[str, ...] = ()


class RunView(Struct, frozen=True, kw_only=True):
    """State of a run after a report.

    step: number of batches consumed. seconds: since the process started. seconds_left: estimated time until the end of
    the run; None before the first batch. tokens_per_second: mean of the last steps; of all steps if the run has ended.
    trained, discarded: number of groups. rewards: mean rewards of the latest batches, oldest first. evaluations: the
    first and the latest ones. latest: the latest line of metrics.jsonl. has_ended: nothing changes any more.
    """

    step: int = 0
    seconds: float = 0.0
    seconds_left: float | None = None
    tokens_per_second: float | None = None
    trained: int = 0
    discarded: dict[str, int] = {}
    rewards: tuple[float, ...] = ()
    evaluations: tuple[EvalReport, ...] = ()
    latest: MetricsLine | None = None
    sample: Sample | None = None
    has_ended: bool = False


class Display:
    """A display, which shows nothing by default. Its methods are called from the event loop and return immediately."""

    def start(self) -> None:
        """Start, with the facts of the run."""

    def show(self, view: RunView) -> None:
        """Show the state of the run."""

    def close(self) -> None:
        """End. Closing again has no effect."""


class PlainDisplay(Display):
    """Writes the facts, every evaluation, and a step every few seconds, in lines that fit the width of the console.

    The first step without a line is announced, once. If nothing was written for `REMINDER_SECONDS`, one line says what
    the run waits for. For files, pipes and simple terminals: no colors, no cursor movements.
    """

    def __init__(
        self, console: Console, facts: RunFacts, gauges: Gauges, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._facts, self._gauges, self._clock = console, facts, gauges, clock
        self._next_line_at, self._shown_step = 0.0, facts.resumed_from or 0
        self._evaluation: EvalReport | None = None
        self._said_that_steps_are_left_out = False
        self._view = RunView()
        self._written_at = clock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Write the facts."""
        print_facts(self._console, self._facts)
        threading.Thread(target=self._remind, name="reminder", daemon=True).start()

    def show(self, view: RunView) -> None:
        """Write a new evaluation immediately, and a new step if enough time has passed or it is the last."""
        self._view = view
        if view.evaluations and view.evaluations[-1] != self._evaluation:
            self._evaluation = view.evaluations[-1]
            self._write(self._position(self._evaluation.step), evaluation_pieces(self._evaluation))
        if view.has_ended or view.step >= self._facts.steps or self._clock() >= self._next_line_at:
            self._show_step()
        elif view.step != self._shown_step and not self._said_that_steps_are_left_out:
            self._said_that_steps_are_left_out = True
            text = f"a step is written every {SECONDS_BETWEEN_LINES:g} s at most; metrics.jsonl has all steps"
            self._write(" " * (len(self._position(0)) + 2), [text])

    def close(self) -> None:
        """Write the last step if it is not shown yet, as after a drain."""
        self._closed.set()
        self._show_step()

    def remind(self) -> None:
        """Write what the run waits for, if nothing was written for a while."""
        if self._clock() - self._written_at >= REMINDER_SECONDS:
            waiting = self._gauges().waiting_for or "the update of the policy"
            self._write(self._position(self._view.step), [f"waiting for {waiting}"])

    def _remind(self) -> None:
        while not self._closed.wait(REMINDER_SECONDS):
            with suppress(Exception):  # a console that cannot be written
                self.remind()

    def _show_step(self) -> None:
        if self._view.latest is None or self._view.step == self._shown_step:
            return
        self._shown_step, self._next_line_at = self._view.step, self._clock() + SECONDS_BETWEEN_LINES
        self._write(self._position(self._view.step), self._step_pieces(self._view, self._view.latest))
        indent = " " * (len(self._position(0)) + 2)
        gauges = self._gauges()
        self._write(indent, reward_pieces(self._view.latest))
        self._write(indent, [f"alarm {finding.name}" for finding in gauges.findings])

    def _write(self, start: str, pieces: Iterable[str]) -> None:
        found = list(pieces)
        if not found:
            return
        self._written_at = self._clock()
        first = f"{start}  {found[0]}" if start.strip() else f"{start}{found[0]}"
        for line in in_lines([first, *found[1:]], self._console.width, indent=len(self._position(0)) + 2):
            print_line(self._console, line)

    def _step_pieces(self, view: RunView, latest: MetricsLine) -> Iterator[str]:
        if self._facts.rewards or latest["reward/mean"] is not None:
            yield f"reward {number(latest['reward/mean']):>6}"
        yield f"loss {number(latest['loss'], '.4f'):>7}"
        yield f"truncated {share(latest['truncated_fraction']):>5}"
        yield f"{number(view.tokens_per_second, '.0f'):>6} tokens/s"
        yield from known("kl", latest["kl"], ".4f")
        yield f"entropy {number(latest['entropy'])}"
        yield f"staleness {number(latest['staleness/mean'], '.1f')}"
        yield f"{duration(view.seconds)} elapsed"
        yield f"{duration(view.seconds_left)} left"
        if latest["groups/discarded"]:
            yield f"discarded {latest['groups/discarded']}"
        yield from solved_pieces(latest)
        yield from chain(*SHOWN(latest))

    def _position(self, step: int) -> str:
        digits = len(str(self._facts.steps))
        return f"step {step:>{digits}}/{self._facts.steps}"


def known(name: str, value: float | None, form: str = ".3f") -> Iterator[str]:
    """Yield a name with its value, unless the run does not compute it."""
    if value is not None:
        yield f"{name} {number(value, form)}"


def evaluation_pieces(report: EvalReport) -> Iterator[str]:
    """Yield accuracy and duration of an evaluation, the accuracy by type of problem, and the other measures."""
    yield f"held-out accuracy {accuracy_text(report)}"
    yield f"in {duration(report.seconds)}"
    for name, accuracy in report.by_type.items():
        yield f"{name} {percent(accuracy)}"
    for row in rows(report, functions=False):
        yield f"{row.label} {row.text}"


def solved_pieces(latest: MetricsLine) -> Iterator[str]:
    """Yield the shares of the groups of a step of which all, none or some completions solved the problem."""
    shares = {solved: latest[name] for solved, name in SOLVED_METRICS.items()}
    if shares["all"] is not None:
        yield "solved by " + ", ".join(f"{solved} {share(value)}" for solved, value in shares.items())


def reward_pieces(latest: MetricsLine) -> Iterator[str]:
    """Yield mean, standard deviation and failures of each reward function that applied to a problem of the step."""
    for name, values in latest["rewards"].items():
        failed = f" ({values['failures']} failed)" if values["failures"] else ""
        if values["count"] or failed:
            yield f"{name} {number(values['mean'])} sd {number(values['std'])}{failed}"


def print_facts(console: Console, facts: RunFacts) -> None:
    """Write the facts of a run, in lines that fit the width of the console as far as words can be separated."""
    for text in fact_lines(facts):
        for line in wrapped(text, console.width, indent=LABEL_WIDTH):
            print_line(console, line)


def machine_lines(machine: MachineDescription, compute_path: str) -> Iterator[str]:
    """Return the lines about the machine and about what computes. Processor and BLAS are named once."""
    device = "" if machine.device in (machine.processor, machine.backend) else f" ({machine.device})"
    blas = "" if machine.blas in compute_path else f"; BLAS {machine.blas}"
    yield (
        f"machine  {machine.processor}, {machine.cores} cores, {memory(machine.memory_bytes)}, {machine.system}; "
        f"MLX {machine.mlx_version} on {machine.backend}{device}{blas}"
    )
    yield f"compute  {compute_path}"


def fact_lines(facts: RunFacts) -> Iterator[str]:
    """Return the lines of the startup screen: machine, policy, memory, system message, rewards, address, run."""
    policy = facts.policy
    yield from machine_lines(facts.machine, facts.compute_path)
    bits = f", {policy.quantization_bits} bits" if policy.quantization_bits else ""
    yield (
        f"policy   {facts.model}: {policy.architecture}, {size(policy.parameters)} parameters, {policy.layers} layers"
        f"{bits}, {policy.dtype}; {size(policy.trainable_parameters)} trained, {memory(policy.bytes)}"
    )
    yield f"memory   about {memory(facts.estimated_memory)} (estimate; --dry-run shows its parts)"
    yield f"system   {facts.system_message or 'no system message'}"
    for number_of_reward, reward in enumerate(facts.rewards or ("none of the run itself",)):
        yield f"{'' if number_of_reward else 'rewards':<9}{reward}"
    yield f"API      {facts.address}/v1" if facts.address else "API      off"
    if facts.address:
        yield f"page     {facts.address}/"
    yield f"run      {facts.profile}, {facts.steps} steps, in {facts.run_dir}"
    if facts.resumed_from:
        yield f"resumed  from the checkpoint of step {facts.resumed_from}"
    elif facts.resumed_from == 0:
        yield "resumed  from the beginning, because the run has no checkpoint yet"


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
        width = max(8, options.max_width - ROW_LABEL_WIDTH - 1)
        table = Table.grid(padding=(0, 1, 0, 0), expand=False)
        table.add_column(style="bold", width=ROW_LABEL_WIDTH - 1, no_wrap=True)
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
            yield from (f"{row.label} {row.text}" for row in rows(report, functions=False))

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
        yield from chain(*SHOWN(latest))

    def _sample(self, sample: Sample, console: Console, width: int, height: int, ascii_only: bool) -> Group:
        """Return the prompt on one line, and the begin of the completion on the other ones."""
        prompt = f"reward {number(sample.reward)}  prompt: {sample.prompt}"
        head = Text(terminal_text(prompt, PROMPT_LIMIT, ascii_only=ascii_only))
        head.truncate(width, overflow="crop" if ascii_only else "ellipsis")
        text = terminal_text(sample.completion, COMPLETION_LIMIT, ascii_only=ascii_only)
        return Group(head, *Text(text, style="cyan", overflow="fold").wrap(console, width)[: height - 1])


class LiveDisplay(Display):
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
            return Display()
