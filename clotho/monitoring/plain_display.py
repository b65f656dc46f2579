"""Plain lines for files and pipes: the facts, then a short line per step, at most one every few seconds.

The head of every display: what runs, on what, and where it answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from clotho.monitoring.display import RunFacts, RunView
from clotho.monitoring.terminal_text import duration, memory, number, percent, size, visible
from protocols.evaluation import EvalReport

LINE_LIMIT = 1000


def print_facts(console: Console, facts: RunFacts) -> None:
    """Write the facts, one line each."""
    for line in fact_lines(facts):
        print_line(console, line)


def print_line(console: Console, line: str) -> None:
    """Write one line that is never broken, without markup or control characters in it."""
    console.print(Text(visible(line, LINE_LIMIT, ascii_only=console.options.ascii_only)), soft_wrap=True)


def fact_lines(facts: RunFacts) -> Iterator[str]:
    """Machine, policy, memory, address, run directory."""
    machine, policy = facts.machine, facts.policy
    yield (
        f"machine  {machine.processor}, {machine.cores} cores, {memory(machine.memory_bytes)}, {machine.system}; "
        f"MLX {machine.mlx_version} on {machine.backend} ({machine.device}); BLAS {machine.blas}"
    )
    bits = f", {policy.quantization_bits} bits" if policy.quantization_bits else ""
    yield (
        f"policy   {facts.model}: {policy.architecture}, {size(policy.parameters)} parameters, {policy.layers} layers"
        f"{bits}, {policy.dtype}; {size(policy.trainable_parameters)} trained, {memory(policy.bytes)}"
    )
    yield f"memory   {memory(facts.estimated_memory)} at most, by estimate; --dry-run shows its parts"
    yield f"API      {facts.address}/v1" if facts.address else "API      off"
    resumed = f"; resumed from step {facts.resumed_from}" if facts.resumed_from is not None else ""
    yield f"run      {facts.profile}, {facts.steps} steps, in {facts.run_dir}{resumed}"


SECONDS_BETWEEN = 2.0


class PlainDisplay:
    """Aligned lines, no colours, no cursor movements."""

    def __init__(self, console: Console, facts: RunFacts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._facts, self._clock = console, facts, clock
        self._next, self._step = 0.0, 0
        self._measured: EvalReport | None = None

    def start(self) -> None:
        """Write the facts."""
        print_facts(self._console, self._facts)

    def show(self, view: RunView) -> None:
        """Write a measurement at once, a step if its time has come or it is the last."""
        if view.evaluations and view.evaluations[-1] != self._measured:
            self._measured = view.evaluations[-1]
            print_line(self._console, self._measurement(self._measured))
        last = view.step >= self._facts.steps
        if view.latest is not None and view.step != self._step and (last or self._clock() >= self._next):
            self._step, self._next = view.step, self._clock() + SECONDS_BETWEEN
            print_line(self._console, self._line(view))

    def close(self) -> None:
        """Nothing is left to do: every line was written at once."""

    def _measurement(self, report: EvalReport) -> str:
        kinds = "  ".join(f"{kind} {percent(share)}" for kind, share in report.by_type.items())
        return (
            f"{self._place(report.step)}  held-out accuracy {percent(report.accuracy)} of {report.problems}"
            f"  in {duration(report.seconds)}  {kinds}"
        )

    def _line(self, view: RunView) -> str:
        latest = view.latest
        assert latest is not None
        lost = f"  discarded {latest.groups_discarded}" if latest.groups_discarded else ""
        return (
            f"{self._place(view.step)}  reward {number(latest.reward_mean):>6}  kl {number(latest.kl, '.4f'):>7}"
            f"  entropy {number(latest.entropy):>5}  stale {number(latest.staleness_mean, '.1f'):>3}"
            f"  {number(latest.tokens_per_second, '.0f'):>6} tokens/s  {duration(view.seconds):>7}"
            f"  left {duration(view.seconds_left(self._facts.steps)):>7}{lost}"
        )

    def _place(self, step: int) -> str:
        digits = len(str(self._facts.steps))
        return f"step {step:>{digits}}/{self._facts.steps}"
