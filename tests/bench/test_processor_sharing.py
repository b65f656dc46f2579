"""Processor sharing: tasks at the same time divide the rate of a resource."""

from __future__ import annotations

import pytest
import simpy

from bench.processor_sharing import SharedRate, cores, link


def ends(env: simpy.Environment, shared: SharedRate, *tasks: tuple[float, float, float]) -> list[float]:
    """Start tasks (moment, work, weight); return when each ends."""
    found = [0.0] * len(tasks)

    def run(place: int, moment: float, work: float, weight: float) -> simpy.events.ProcessGenerator:
        yield env.timeout(moment)
        yield shared.start(work, weight).done
        found[place] = env.now

    for place, task in enumerate(tasks):
        env.process(run(place, *task))
    env.run()
    return found


def test_two_tasks_have_half_of_the_rate_each() -> None:
    """A task that begins later delays the first one for as long as both run."""
    env = simpy.Environment()
    assert ends(env, SharedRate(env, link(1.0)), (0.0, 2.0, 1.0), (1.0, 0.5, 1.0)) == pytest.approx([2.5, 2.0])


def test_weights_divide_the_rate() -> None:
    """A task of weight 3 has three quarters of a core."""
    env = simpy.Environment()
    assert ends(env, SharedRate(env, cores(1, 1.0)), (0.0, 3.0, 3.0), (0.0, 1.0, 1.0)) == pytest.approx([4.0, 4.0])


def test_processes_on_cores() -> None:
    """One process has a core of its own; two have the efficiency of two cores; further ones divide the cores."""
    rate = cores(2, 0.8)
    assert [rate(1), rate(2), rate(4)] == pytest.approx([1.0, 0.8, 0.4])
    assert rate(1.5) == pytest.approx(0.9)


def test_a_task_that_is_stopped_returns_what_is_left() -> None:
    """Its event never succeeds; the other tasks have the whole rate."""
    env = simpy.Environment()
    shared = SharedRate(env, link(1.0))
    first, second = shared.start(4.0), shared.start(4.0)
    env.run(until=2.0)
    assert shared.stop(first) == pytest.approx(3.0)
    env.run(until=second.done)
    assert env.now == pytest.approx(5.0)
    assert not first.done.triggered
    assert shared.used() == pytest.approx(5.0)
