"""Turns: the evaluation of a graph, divided into parts that take at most a given time.

Updates, scoring and prefill beside a learner are divided. Where components share a device, others compute between two
turns (`clotho.lanes.arbiter`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import structlog

from clotho.models.stages import Stage, Stages, recorded_stages

log = structlog.get_logger(actor="learner")

ADAPTATION = 0.3
"""Weight of the newest measurement in the time per unit of work."""

LARGEST_CORRECTION = 4.0
"""Limit on the ratio of measured to expected time: a machine that was busy for a moment is not slow."""


class Turns(Protocol):
    """The right to compute of one thread: a `clotho.lanes.arbiter.Lane`."""

    def pause(self) -> None:
        """End the turn, and begin the next one as soon as it is this thread's. Raises WorkCancelled to end the work."""

    def outside(self) -> AbstractContextManager[None]:
        """Return a context in which this thread waits for something else, without a turn."""


class _Unshared:
    """Turns of a thread that computes alone."""

    def pause(self) -> None:
        """Go on."""

    def outside(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()


UNSHARED: Turns = _Unshared()


class TurnBudget:
    """Divides evaluations into turns of at most `seconds`; a stage that takes longer has a turn of its own.

    The expected time of a stage is its work times the measured time per unit of work of its kind. The first stage of
    each kind is measured alone, which happens in the warmup step; later parts of turns correct the times. The division
    into turns changes no result.
    """

    def __init__(
        self, seconds: float, lane: Turns = UNSHARED, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """seconds: 0 means that evaluations are not divided. lane: gives the turns."""
        self._seconds, self._lane = seconds, lane
        self._clock = clock
        self._rates: dict[str, float] = {}
        self._began = clock()
        self._logged = False

    @contextmanager
    def recorded(self, model: nn.Module, *, gradients: bool) -> Iterator[Stages]:
        """Record the stages of the graph that is built inside the context.

        gradients: the graph has a backward pass. A model without a list of blocks cannot be divided between blocks;
        this is logged once.
        """
        if not self._seconds:
            yield Stages()
            return
        with recorded_stages(getattr(model, "layers", ()), gradients=gradients) as stages:
            yield stages
        if not stages.has_blocks and not self._logged:
            self._logged = True
            log.warning("learner_turns_not_divided", model=type(model).__module__)

    def begin(self) -> None:
        """Begin a turn."""
        self._began = self._clock()

    def pause(self) -> None:
        """End the turn and, after other work, begin the next one."""
        self._lane.pause()
        self.begin()

    def outside(self) -> AbstractContextManager[None]:
        """Return a context in which the thread waits for something else, without a turn."""
        return self._lane.outside()

    def evaluate(self, stages: list[Stage], results: Any) -> None:
        """Evaluate `results` in as many turns as it takes. Arguments are those of `parts`."""
        for _ in self.parts(stages, results):
            self._lane.pause()

    def parts(self, stages: list[Stage], results: Any) -> Generator[None, None, None]:
        """Evaluate `results`; yields where a turn ends, and the caller then begins the next one.

        If all of it fits into the turn, this is one evaluation.

        stages: parts of the graph of `results`, in the order of the computation; empty afterwards, because arrays that
        nobody refers to are freed. results: a tree of arrays.
        """
        if not self._seconds:
            stages.clear()
        stages.reverse()
        count, fresh = len(stages), False
        while stages:
            part = self._next_part(stages, fresh=fresh)
            fresh = not part
            if fresh:
                yield
                self.begin()
                continue
            work = [(stage.kind, stage.work) for stage in part]
            before = self._clock()
            if len(part) == count:
                part.clear()
                mx.eval(results)
            while part:  # one after another: MLX would recompute checkpointed blocks of several stages at once
                mx.eval(part.pop(0).arrays)
            self._measure(work, self._clock() - before)
        mx.eval(results)

    def limited(self, parts: Iterable[None]) -> Generator[None, None, None]:
        """Compute all parts; yields where a turn ends, and the caller then begins the next one."""
        self.begin()
        for _ in parts:
            if self._seconds and self._clock() - self._began > self._seconds:
                yield
                self.begin()

    def _next_part(self, stages: list[Stage], *, fresh: bool) -> list[Stage]:
        """Remove and return the next stages that fit into the rest of the turn: one at least if the turn is fresh."""
        room = self._seconds - (self._clock() - self._began)
        part: list[Stage] = []
        while stages:
            rate = self._rates.get(stages[-1].kind)
            room -= self._seconds / 2 if rate is None else rate * stages[-1].work
            if (room < 0 or (rate is None and part)) and (part or not fresh):
                break
            part.append(stages.pop())
            if rate is None:
                break
        return part

    def _measure(self, work: Sequence[tuple[str, int]], seconds: float) -> None:
        """Learn from a part of a turn, whose stages are given as kinds and amounts of work."""
        first, amount = work[0]
        if first not in self._rates:
            self._rates[first] = seconds / max(1, amount)
            return
        expected = sum(self._rates[kind] * amount for kind, amount in work)
        ratio = min(LARGEST_CORRECTION, seconds / expected) if expected else 1.0
        for kind in {kind for kind, _ in work}:
            self._rates[kind] *= 1.0 + ADAPTATION * (ratio - 1.0)


UNDIVIDED = TurnBudget(0.0)
"""No limit: an evaluation is one turn."""
