"""The forecast of a run's end follows the cost of its steps."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest

from tests.training_run.records.display_examples import evaluation
from training_run.records.forecast import EvaluationTime, RemainingWork, RunForecast, StepTime, seconds_left, step_time

RECORDED = Path(__file__).with_name("recorded_step_times.json")
NO_EVALUATION = RemainingWork(steps=100, evaluates=False)


def steps(*durations: float, groups: int = 8) -> list[StepTime]:
    """Steps with these durations, of which half is decoding and half learning."""
    return [
        StepTime(end=end, decode=d / 2, update=d, sampled=1000, trained=100 * groups, groups=groups)
        for d, end in zip(durations, accumulate(durations), strict=True)
    ]


def test_there_is_no_forecast_before_the_first_step() -> None:
    """After one step, its duration without the first evaluation is that of all."""
    assert seconds_left(NO_EVALUATION, 0, [], None) is None
    first = EvaluationTime(problems=10, seconds=3.0)
    assert seconds_left(NO_EVALUATION, 1, steps(5.0), first) == pytest.approx(99 * 2.0)


def test_equal_steps_continue_with_the_same_duration() -> None:
    """The first step, which loads and compiles, does not count."""
    assert seconds_left(NO_EVALUATION, 20, steps(60.0, *[2.0] * 19), None) == pytest.approx(80 * 2.0)


def test_evaluations_to_come_are_added() -> None:
    """At the speed of the first one: twice 5 problems in between, and 10 at the end."""
    plan = RemainingWork(steps=100, evaluates=True, interval=30, between=5)
    left = seconds_left(plan, 40, steps(*[1.0] * 40), EvaluationTime(problems=10, seconds=4.0))
    assert left == pytest.approx(60 + 0.4 * (2 * 5 + 10))
    assert seconds_left(plan, 100, steps(*[1.0] * 100), EvaluationTime(problems=10, seconds=4.0)) == pytest.approx(4.0)


def test_a_falling_number_of_trained_groups_shortens_the_steps_to_come() -> None:
    """The trend is damped: it ends before no group is left."""
    falling = [
        StepTime(end=float(i), decode=0.1, update=0.9, sampled=1000, trained=100 * g, groups=g)
        for i, g in enumerate([16, 16, 16, 14, 13, 12, 10])
    ]
    left = seconds_left(NO_EVALUATION, 7, falling, None)
    assert left is not None
    assert 0.3 * 93 < left < 0.75 * 93


def test_steps_without_any_trained_group_have_a_forecast() -> None:
    """Zero tokens are no divisor."""
    idle = [StepTime(end=float(i), decode=0.0, update=0.0, sampled=0, trained=0, groups=0) for i in range(1, 9)]
    assert seconds_left(NO_EVALUATION, 8, idle, None) == pytest.approx(92.0)


def test_recorded_runs_are_forecast_within_a_fifth_after_ten_steps() -> None:
    """Five runs of `local-m3` under different load; `end` is the age at which each ended."""
    for run in json.loads(RECORDED.read_text()):
        recorded = [StepTime(**step) for step in run["steps"]]
        plan = RemainingWork(steps=60, evaluates=True, interval=20, between=256)
        left = seconds_left(plan, 10, recorded[:10], EvaluationTime(**run["first_evaluation"]))
        assert left is not None
        assert recorded[9].end + left == pytest.approx(run["end"], rel=0.2)


def test_a_running_process_forecasts_from_its_own_steps() -> None:
    """The time since the last step is subtracted; a later evaluation does not replace the first one."""
    assert step_time(metrics(1, 1.0)).trained == 0
    forecast = RunForecast(RemainingWork(steps=10, evaluates=True), began=100.0)
    assert forecast.seconds_left(100.0) is None
    forecast.add_evaluation(evaluation(0, 0.4))
    for step in range(1, 6):
        forecast.add_step(metrics(step, 100.0 + step))
    forecast.add_evaluation(evaluation(5, 0.4))
    first = evaluation(0, 0.4).seconds
    assert forecast.seconds_left(105.0) == pytest.approx(5.0 + first)
    assert forecast.seconds_left(106.0) == pytest.approx(4.0 + first)
    assert forecast.seconds_left(1000.0) == 0.0


def metrics(step: int, end: float) -> dict[str, object]:
    """The part of a line of metrics.jsonl that the forecast reads."""
    line: dict[str, object] = {
        "step": step, "time/run": end, "time/decode": 0.5, "time/update": 1.0, "time/wait_for_rollouts": 0.0,
        "completion_length/total": 100, "trained_tokens": None, "groups/trained": 0,
    }  # fmt: skip
    return line
