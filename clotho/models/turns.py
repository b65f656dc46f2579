"""Turns: the evaluation of a graph, divided into parts that take at most a given time.

Updates, parity checks and prefill beside a learner are divided. Between two turns, the compute thread runs decode
steps, requests and weight swaps. They see the served weights, because a graph is complete before its first part is
evaluated, and refers to its own arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import structlog

from clotho.models.stages import Stage, Stages, recorded_stages

log = structlog.get_logger(actor="learner")

ADAPTATION = 0.3
"""Weight of the newest measurement in the time per unit of work."""

LARGEST_CORRECTION = 4.0
"""Limit on the ratio of measured to expected time: a machine that was busy for a moment is not slow."""


class TurnBudget:
    """Divides evaluations into turns of at most `seconds`; a stage that takes longer has a turn of its own.

    The expected time of a stage is its work times the measured time per unit of work of its kind. The first stage of
    each kind is measured alone, which happens in the warmup step; later parts of turns correct the times. The division
    into turns changes no result.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """seconds: 0 means that evaluations are not divided."""
        self._seconds = seconds
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

    def pause(self) -> Generator[None, None, None]:
        """End the turn and, after other work, begin the next one."""
        yield
        self.begin()

    def evaluate(self, stages: list[Stage], results: Any) -> Generator[None, None, None]:
        """Evaluate `results`; yields between turns. If all of it fits into the turn, this is one evaluation.

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
                yield from self.pause()
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
