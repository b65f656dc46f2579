"""Whether speculation pays: seconds per token of decode steps with and without drafts, by batch size."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import structlog

log = structlog.get_logger(__name__)

BASELINE_STEPS, TRIAL_STEPS = 8, 24
"""Number of steps without and with drafts from which the two are compared."""

WAIT_STEPS, MAX_WAIT_STEPS = 256, 4096
"""Number of steps until the next comparison. While speculation is off, it doubles with each comparison."""

MIN_GAIN = 1.1
"""Speculation turns on again if it samples this many times as many tokens per second. It turns off below 1."""

Phase = Literal["baseline", "trial", "decided"]


@dataclass(slots=True)
class _BatchSize:
    """The comparison for batches of similar size. is_on: whether steps speculate between comparisons.

    plain, drafted: seconds per token of each step of the comparison.
    """

    is_on: bool = True
    phase: Phase = "baseline"
    left: int = BASELINE_STEPS
    wait: int = WAIT_STEPS
    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)


class Payoff:
    """Turns speculation off where it samples fewer tokens per second than plain decoding, and on again where it pays.

    Batch sizes from one power of two to the next are judged on their own, because a forward pass over more tokens costs
    almost nothing in a small batch and its full share in a large one.
    """

    def __init__(self, *, always: bool) -> None:
        """always: speculate at every step and measure nothing, so that steps do not depend on time."""
        self._always = always
        self._sizes: dict[int, _BatchSize] = {}

    def speculates(self, rows: int) -> bool:
        """Whether the next step of a batch of `rows` rows uses drafts."""
        if self._always:
            return True
        size = self._sizes.setdefault(rows.bit_length(), _BatchSize())
        return size.phase == "trial" or (size.phase == "decided" and size.is_on)

    def observe(self, rows: int, seconds: float, tokens: int, *, drafted: bool) -> None:
        """Record a decode step. A step without drafts says nothing while speculation is on: there were none."""
        if self._always or not tokens or (self.speculates(rows) and not drafted):
            return
        size = self._sizes.setdefault(rows.bit_length(), _BatchSize())
        if size.phase != "decided":
            (size.drafted if drafted else size.plain).append(seconds / tokens)
        size.left -= 1
        if size.left > 0:
            return
        if size.phase == "baseline":
            size.phase, size.left = "trial", TRIAL_STEPS
        elif size.phase == "trial":
            self._decide(rows, size)
        else:
            size.plain, size.drafted = [], []
            size.phase, size.left = "baseline", BASELINE_STEPS

    def _decide(self, rows: int, size: _BatchSize) -> None:
        plain, drafted = median(size.plain), median(size.drafted)
        was_on, size.is_on = size.is_on, plain >= drafted * (1.0 if size.is_on else MIN_GAIN)
        size.wait = WAIT_STEPS if size.is_on else min(2 * size.wait, MAX_WAIT_STEPS)
        size.phase, size.left = "decided", size.wait
        if size.is_on != was_on:
            log.info(
                "speculation_on" if size.is_on else "speculation_off",
                rows_from=1 << (rows.bit_length() - 1),
                rows_to=(1 << rows.bit_length()) - 1,
                tokens_per_second=round(1.0 / max(drafted, 1e-9)),
                tokens_per_second_plain=round(1.0 / max(plain, 1e-9)),
            )
