"""Processor sharing in a simulation: tasks that run at the same time share the rate of a resource.

The cores of a machine and the bandwidth of a link are such resources. The method is that of virtual time: each task has
the same rate per unit of weight, so that the order in which tasks end depends only on the work that each has left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import simpy


class Task:
    """Work in progress. done: succeeds when the work is done; it never succeeds after `stop`."""

    __slots__ = ("done", "end", "running", "weight")

    def __init__(self, done: simpy.Event, end: float, weight: float) -> None:
        """end: virtual time at which the work is done."""
        self.done, self.end, self.weight = done, end, weight
        self.running = True


class SharedRate:
    """A resource whose rate is shared by its tasks, in proportion to their weights.

    used_seconds: time in which there was a task.
    """

    def __init__(self, env: simpy.Environment, rate: Callable[[float], float]) -> None:
        """rate: work per second that a task of weight 1 gets, by the sum of all weights."""
        self._env, self._rate = env, rate
        self._virtual = self._moment = self._weight = 0.0
        self._tasks = 0
        self._ends: list[tuple[float, int, Task]] = []
        self._serial, self._alarm = count(), 0
        self.used_seconds = 0.0

    def start(self, work: float, weight: float = 1.0) -> Task:
        """Begin a task."""
        self._advance()
        task = Task(self._env.event(), self._virtual + work / weight, weight)
        self._weight += weight
        self._tasks += 1
        self._push(task)
        return task

    def stop(self, task: Task) -> float:
        """End a task before its work is done; return the work that was left."""
        self._advance()
        self._remove(task)
        self._set_alarm()
        return max(0.0, task.end - self._virtual) * task.weight

    def reweigh(self, task: Task, weight: float) -> None:
        """Change the weight of a task that runs."""
        if not task.running or task.weight == weight:
            return
        self._advance()
        left = max(0.0, task.end - self._virtual) * task.weight
        self._weight += weight - task.weight
        task.end, task.weight = self._virtual + left / weight, weight
        self._push(task)

    def used(self) -> float:
        """Return the seconds so far in which there was a task."""
        self._advance()
        return self.used_seconds

    def _push(self, task: Task) -> None:
        heapq.heappush(self._ends, (task.end, next(self._serial), task))
        self._set_alarm()

    def _advance(self) -> None:
        elapsed, self._moment = self._env.now - self._moment, self._env.now
        if self._tasks and elapsed > 0.0:
            self._virtual += elapsed * self._rate(self._weight)
            self.used_seconds += elapsed

    def _remove(self, task: Task) -> None:
        task.running = False
        self._tasks -= 1
        self._weight = self._weight - task.weight if self._tasks else 0.0

    def _set_alarm(self) -> None:
        """Wake at the end of the task that is next; earlier alarms are void."""
        ends = self._ends
        while ends and not (ends[0][2].running and ends[0][0] == ends[0][2].end):
            heapq.heappop(ends)
        self._alarm += 1
        if ends:
            seconds = max(0.0, ends[0][0] - self._virtual) / self._rate(self._weight)
            alarm = self._env.timeout(seconds, value=self._alarm)
            assert alarm.callbacks is not None
            alarm.callbacks.append(self._end_tasks)

    def _end_tasks(self, alarm: Any) -> None:
        if alarm.value != self._alarm:
            return
        self._advance()
        due, ends = self._ends[0][0], self._ends
        self._virtual = max(self._virtual, due)
        while ends and ends[0][0] <= due:
            end, _, task = heapq.heappop(ends)
            if task.running and end == task.end:
                self._remove(task)
                task.done.succeed()
        self._set_alarm()


def cores(number: float, efficiency: float) -> Callable[[float], float]:
    """Rate of a process on a machine, by the number of processes that compute.

    efficiency: rate of a process while every core computes, relative to the rate of a process that computes alone. In
    between, the rate is interpolated. Beyond `number` processes, the cores are divided equally.
    """

    def rate(busy: float) -> float:
        if busy <= 1.0:
            return 1.0
        if busy >= number:
            return efficiency * number / busy
        return 1.0 - (1.0 - efficiency) * (busy - 1.0) / (number - 1.0)

    return rate


def link(bandwidth: float) -> Callable[[float], float]:
    """Bytes per second of a transfer, by the number of transfers over a link."""
    return lambda transfers: bandwidth / max(transfers, 1.0)
