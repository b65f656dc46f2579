"""The decode engine of a simulated cluster, and the devices that engines and learner compute on.

An engine is simulated from one change of its rows to the next, and not step by step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import simpy

from bench.cluster_costs import Costs, Plan
from bench.processor_sharing import SharedRate, Task

WAVE = 8
"""Rows are admitted when this fraction of an engine is free (`clotho.inference.scheduler`)."""


class Group:
    """A group in flight. oldest: version that sampled its first token. open: completions that are not finished."""

    __slots__ = ("done", "lengths", "oldest", "open", "zero_variance")

    def __init__(self, lengths: tuple[int, ...], zero_variance: bool) -> None:
        self.lengths, self.zero_variance = lengths, zero_variance
        self.oldest, self.open = -1, len(lengths)
        self.done: simpy.Event | None = None


class Rate(Protocol):
    """What an engine computes on."""

    def start(self, work: float) -> Task:
        """Begin a task."""

    def stop(self, task: Task) -> float:
        """End a task early; return the work that was left."""


class LearnerDevice:
    """A device that computes one job at a time; jobs share it equally, and with the run's engine by `decode_share`."""

    def __init__(self, machine: SharedRate, decode_share: float) -> None:
        self._machine, self._share = machine, decode_share
        self._jobs: list[Task] = []
        self._engine: Task | None = None

    def job(self, work: float) -> simpy.Event:
        """Begin a job; return the event of its end."""
        task = self._machine.start(work, 1.0)
        self._jobs.append(task)
        assert task.done.callbacks is not None
        task.done.callbacks.append(lambda _: self._ended(task))
        self._divide()
        return task.done

    def start(self, work: float) -> Task:
        """Begin a task of the run's engine."""
        self._engine = task = self._machine.start(work, 1.0)
        assert task.done.callbacks is not None
        task.done.callbacks.append(lambda _: self._engine_ended(task))
        self._divide()
        return task

    def stop(self, task: Task) -> float:
        """End a task of the run's engine early; return the work that was left."""
        left = self._machine.stop(task)
        self._engine_ended(task)
        return left

    def _ended(self, task: Task) -> None:
        self._jobs.remove(task)
        self._divide()

    def _engine_ended(self, task: Task) -> None:
        if self._engine is task:
            self._engine = None
            self._divide()

    def _divide(self) -> None:
        jobs = (1.0 - self._share) if self._engine else 1.0
        for task in self._jobs:
            self._machine.reweigh(task, jobs / len(self._jobs))
        if self._engine is not None:
            self._machine.reweigh(self._engine, self._share if self._jobs else 1.0)


class Engine:
    """The decode engine of a worker: rows join, every step samples a token for each row, rows leave."""

    def __init__(self, rate: Rate, costs: Costs, plan: Plan, served: Callable[[], int], changed: Callable[[], None]):
        """served: the version that samples. changed: called when the number of rows changes."""
        self._rate, self._costs, self._limit = rate, costs, plan.max_num_seqs
        self._served, self._changed = served, changed
        self._waiting: deque[tuple[Group, list[int]]] = deque()
        self._ends: list[tuple[float, int, Group]] = []
        self._serial, self._steps = count(), 0.0
        self._task: Task | None = None
        self._joining: list[tuple[Group, list[int]]] = []

    @property
    def rows(self) -> int:
        """Number of rows that are decoded."""
        return len(self._ends)

    @property
    def has_work(self) -> bool:
        """Whether a group is in the engine."""
        return bool(self._ends or self._waiting or self._joining)

    def submit(self, group: Group) -> None:
        """Add a group, whose event `done` will succeed with True."""
        self._waiting.append((group, list(group.lengths)))
        if self._task is None:
            self._continue()
        elif not self._joining and self._fits():
            left = self._rate.stop(self._task)
            self._task = None
            self._steps = self._ends[0][0] - left / self._step_seconds()
            self._continue()

    def fail(self) -> list[Group]:
        """Drop all groups, and return them."""
        if self._task is not None:
            self._rate.stop(self._task)
            self._task = None
        lost = {id(group): group for group, _ in (*self._waiting, *self._joining)}
        lost |= {id(group): group for _, _, group in self._ends}
        self._waiting.clear()
        self._joining.clear()
        self._ends.clear()
        self._changed()
        return list(lost.values())

    def _step_seconds(self) -> float:
        return self._costs.step_seconds + len(self._ends) * self._costs.row_seconds

    def _fits(self) -> bool:
        """Whether rows of the next group are admitted now, as by the scheduler of the engine."""
        room = self._limit - len(self._ends) - sum(len(rows) for _, rows in self._joining)
        running = bool(self._ends or self._joining)
        return not (room < min(len(self._waiting[0][1]), max(1, self._limit // WAVE)) and (running or room < 1))

    def _continue(self) -> None:
        seconds = 0.0
        while self._waiting and self._fits():
            group, rows = self._waiting.popleft()
            room = self._limit - len(self._ends) - sum(len(joining) for _, joining in self._joining)
            self._joining.append((group, rows[:room]))
            seconds += self._costs.group_seconds * len(rows[:room]) / len(group.lengths)
            if rows[room:]:
                self._waiting.appendleft((group, rows[room:]))
        if self._joining:
            self._begin(seconds, self._join)
        elif self._ends:
            self._begin((self._ends[0][0] - self._steps) * self._step_seconds(), self._leave)

    def _begin(self, work: float, then: Callable[[], None]) -> None:
        self._task = task = self._rate.start(work)
        assert task.done.callbacks is not None

        def ended(_: Any) -> None:
            if self._task is task:
                self._task = None
                then()

        task.done.callbacks.append(ended)

    def _join(self) -> None:
        for group, rows in self._joining:
            if group.oldest < 0:
                group.oldest = self._served()
            for length in rows:
                heapq.heappush(self._ends, (self._steps + length, next(self._serial), group))
        self._joining.clear()
        self._changed()
        self._continue()

    def _leave(self) -> None:
        self._steps = self._ends[0][0]
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, _, group = heapq.heappop(self._ends)
            group.open -= 1
            if not group.open and group.done is not None:
                group.done.succeed(True)
        self._changed()
        self._continue()
