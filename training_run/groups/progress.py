"""How far a run is: the learner, the weight swaps, and the groups that may start."""

from __future__ import annotations

import statistics
import time
from collections import deque

from msgspec import Struct, field

from protocols.compute import ComputeTotals
from protocols.step import StepReport, WeightsReady
from training_run.supervision.latest import Latest, wait_until

SWAPS_KEPT = 4096


class SwapTimes:
    """Durations of the weight swaps since the last start, in seconds; None before the first swap.

    count: number of swaps; median and longest are those of the last `SWAPS_KEPT`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seconds: deque[float] = deque(maxlen=SWAPS_KEPT)
        self._ended: deque[float] = deque(maxlen=SWAPS_KEPT)

    def add(self, seconds: float) -> None:
        """Record a swap that ends now."""
        self.count += 1
        self._seconds.append(seconds)
        self._ended.append(time.monotonic())

    def ended_after(self, count: int) -> list[float]:
        """Return when the swaps after the first `count` ended, in seconds of `monotonic`."""
        return list(self._ended)[-(self.count - count) :] if self.count > count else []

    @property
    def last(self) -> float | None:
        """Duration of the last swap."""
        return self._seconds[-1] if self._seconds else None

    @property
    def median(self) -> float | None:
        """Median duration."""
        return statistics.median(self._seconds) if self._seconds else None

    @property
    def longest(self) -> float | None:
        """Longest duration."""
        return max(self._seconds, default=None)


class RunWeights(Latest[WeightsReady]):
    """The weights that a run serves, and how long it took to swap them."""

    def __init__(self) -> None:
        super().__init__("weights")
        self.swap_times = SwapTimes()


class LearnerProgress(Struct, kw_only=True):
    """State of the learner that other parts of the run read. A checkpoint keeps the first four fields.

    step: number of batches consumed. bad_steps: consecutive updates that were not finite.
    train_seconds, trained_tokens: totals since the run began.
    last_report: report of the last batch since the last start. began, last_update: monotonic seconds. updating: the
    update of a batch is being computed. computed_before: totals of the compute threads at `began`. computing: what they
    did from then until `last_update`. replacements: number of groups that are replaced by others.
    """

    step: int = 0
    bad_steps: int = 0
    train_seconds: float = 0.0
    trained_tokens: int = 0
    last_report: StepReport | None = None
    began: float = 0.0
    last_update: float = 0.0
    updating: bool = False
    computed_before: ComputeTotals = ComputeTotals()
    computing: ComputeTotals = ComputeTotals()
    replacements: Latest[int] = field(default_factory=lambda: Latest[int]("replacements"))


class StalenessRule(Struct, frozen=True, kw_only=True, eq=False):
    """The staleness bound of the generator.

    After `started` groups since the run began, the next one may start when

        started < (step + max_batches_ahead + 1) * batch_size + replacements

    where `step` is that of the served weights and `replacements` the number of groups replaced by others. This is the
    capacity rule of AReaL (arXiv:2505.24298, section 5.1), accepted + running <= (eta + step + 1) * batch_size, where
    accepted groups are those that count towards a batch. `max_batches_ahead = 0` is strictly on-policy. A slow group
    may be trained on later than groups that started after it; `learner.max_staleness` limits its staleness.
    """

    weights: Latest[WeightsReady]
    replacements: Latest[int]
    batch_size: int
    max_batches_ahead: int

    def capacity(self, started: int) -> int:
        """Number of groups that may start now, after `started` groups."""
        batches = self.weights.value.step + self.max_batches_ahead + 1
        return batches * self.batch_size + self.replacements.value - started

    async def wait(self, started: int) -> None:
        """Wait until the next group may start. Raises EndOfStream if that cannot happen any more."""
        await wait_until(lambda: self.capacity(started) > 0, self.weights, self.replacements)
