"""Displays: what a run shows on the terminal, and the plain display, which writes lines without cursor movements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec import Struct
from rich.console import Console
from rich.text import Text

from clotho.monitoring.metrics import MetricsLine
from clotho.monitoring.terminal_text import duration, memory, number, percent, size, terminal_text
from protocols.evaluation import EvalReport
from protocols.prompt import Problem
from protocols.step import StepReport
from protocols.summary import MachineDescription, PolicyDescription

LINE_LIMIT = 1000
"""Maximum number of characters of a line."""

SECONDS_BETWEEN_LINES = 2.0
"""Minimum time between two step lines of the plain display."""


class Sample(Struct, frozen=True, kw_only=True):
    """One completion of the latest batch, for the live display."""

    prompt: str
    answer: str
    completion: str
    reward: float | None


def sample(report: StepReport) -> Sample | None:
    """Return one completion of a batch; its position in the group changes with the step. None without completions."""
    for group in report.trained:
        scored = group.scored
        i = report.step % len(scored.group.completions)
        return _sample(scored.group.prompt.problem, scored.group.completions[i].text, scored.rewards[i])
    for discarded in report.discarded:
        if discarded.completions:
            i = report.step % len(discarded.completions)
            reward = discarded.rewards[i] if discarded.rewards else None
            return _sample(discarded.prompt.problem, discarded.completions[i].text, reward)
    return None


def _sample(problem: Problem, completion: str, reward: float | None) -> Sample:
    return Sample(prompt=problem.prompt, answer=problem.answer, completion=completion, reward=reward)


class RunFacts(Struct, frozen=True, kw_only=True):
    """Constant facts of a run, for the startup screen.

    compute_path: what computes decoding and training. address: URL of the HTTP API; None if it is off. steps: of the
    whole run. resumed_from: step of the checkpoint that the run resumed from; 0 without a checkpoint; None for a new
    run. estimated_memory: estimated peak memory of arrays in bytes.
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


class RunView(Struct, frozen=True, kw_only=True):
    """State of a run after a report.

    step: number of batches consumed. seconds: since the process started. seconds_left: estimated time until the end of
    the run; None before the first batch. trained, discarded: number of groups. rewards: mean rewards of the latest
    batches, oldest first. evaluations: the first and the latest ones. latest: the latest line of metrics.jsonl.
    """

    step: int = 0
    seconds: float = 0.0
    seconds_left: float | None = None
    trained: int = 0
    discarded: dict[str, int] = {}
    rewards: tuple[float, ...] = ()
    evaluations: tuple[EvalReport, ...] = ()
    latest: MetricsLine | None = None
    sample: Sample | None = None


class Display(Protocol):
    """A display. All methods are called from the event loop and return immediately."""

    def start(self) -> None:
        """Start, with the facts of the run."""

    def show(self, view: RunView) -> None:
        """Show the state of the run."""

    def close(self) -> None:
        """End. Closing again has no effect."""


class NoDisplay:
    """A display that shows nothing."""

    def start(self) -> None:
        """Do nothing."""

    def show(self, view: RunView) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainDisplay:
    """Writes the facts, then one line per evaluation and at most one line per step every few seconds.

    For files, pipes and simple terminals: no colors, no cursor movements.
    """

    def __init__(self, console: Console, facts: RunFacts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._facts, self._clock = console, facts, clock
        self._next_line_at, self._shown_step = 0.0, facts.resumed_from or 0
        self._evaluation: EvalReport | None = None
        self._view = RunView()

    def start(self) -> None:
        """Write the facts."""
        print_facts(self._console, self._facts)

    def show(self, view: RunView) -> None:
        """Write a new evaluation immediately, and a new step if enough time has passed or it is the last."""
        self._view = view
        if view.evaluations and view.evaluations[-1] != self._evaluation:
            self._evaluation = view.evaluations[-1]
            print_line(self._console, self._evaluation_line(self._evaluation))
        if view.step >= self._facts.steps or self._clock() >= self._next_line_at:
            self._show_step()

    def close(self) -> None:
        """Write the last step if it is not shown yet, as after a drain."""
        self._show_step()

    def _show_step(self) -> None:
        if self._view.latest is None or self._view.step == self._shown_step:
            return
        self._shown_step, self._next_line_at = self._view.step, self._clock() + SECONDS_BETWEEN_LINES
        print_line(self._console, self._step_line(self._view, self._view.latest))

    def _evaluation_line(self, report: EvalReport) -> str:
        types = "  ".join(f"{name} {percent(accuracy)}" for name, accuracy in report.by_type.items())
        ungraded = f" ({report.ungraded} ungraded)" if report.ungraded else ""
        return (
            f"{self._position(report.step)}  held-out accuracy {percent(report.accuracy)} of {report.problems}"
            f"{ungraded}  in {duration(report.seconds)}  {types}"
        )

    def _step_line(self, view: RunView, latest: MetricsLine) -> str:
        discarded = f"  discarded {latest['groups/discarded']}" if latest["groups/discarded"] else ""
        return (
            f"{self._position(view.step)}  reward {number(latest['reward/mean']):>6}"
            f"  loss {number(latest['loss'], '.4f'):>7}  kl {number(latest['kl'], '.4f'):>7}"
            f"  entropy {number(latest['entropy']):>5}  staleness {number(latest['staleness/mean'], '.1f'):>3}"
            f"  {number(latest['tokens_per_second'], '.0f'):>6} tokens/s  {duration(view.seconds):>7}"
            f"  left {duration(view.seconds_left):>7}{discarded}"
        )

    def _position(self, step: int) -> str:
        digits = len(str(self._facts.steps))
        return f"step {step:>{digits}}/{self._facts.steps}"


def print_facts(console: Console, facts: RunFacts) -> None:
    """Write the facts of a run, one line each."""
    for line in fact_lines(facts):
        print_line(console, line)


def print_line(console: Console, line: str) -> None:
    """Write one line without wrapping, markup or control characters."""
    console.print(Text(terminal_text(line, LINE_LIMIT, ascii_only=console.options.ascii_only)), soft_wrap=True)


def machine_lines(machine: MachineDescription, compute_path: str) -> Iterator[str]:
    """Return the lines about the machine and about what computes."""
    yield (
        f"machine  {machine.processor}, {machine.cores} cores, {memory(machine.memory_bytes)}, {machine.system}; "
        f"MLX {machine.mlx_version} on {machine.backend} ({machine.device}); BLAS {machine.blas}"
    )
    yield f"compute  {compute_path}"


def fact_lines(facts: RunFacts) -> Iterator[str]:
    """Return the lines of the startup screen: machine, compute path, policy, memory, address, run directory, resume."""
    policy = facts.policy
    yield from machine_lines(facts.machine, facts.compute_path)
    bits = f", {policy.quantization_bits} bits" if policy.quantization_bits else ""
    yield (
        f"policy   {facts.model}: {policy.architecture}, {size(policy.parameters)} parameters, {policy.layers} layers"
        f"{bits}, {policy.dtype}; {size(policy.trainable_parameters)} trained, {memory(policy.bytes)}"
    )
    yield f"memory   at most {memory(facts.estimated_memory)} (estimate; --dry-run shows its parts)"
    yield f"API      {facts.address}/v1" if facts.address else "API      off"
    yield f"run      {facts.profile}, {facts.steps} steps, in {facts.run_dir}"
    if facts.resumed_from:
        yield f"resumed  from the checkpoint of step {facts.resumed_from}"
    elif facts.resumed_from == 0:
        yield "resumed  from the beginning, because the run has no checkpoint yet"
