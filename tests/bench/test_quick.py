"""`python -m bench quick`: limits an order of magnitude away."""

from __future__ import annotations

import pytest

from bench import quick
from bench.contenders.worker import Case, MeasureOnce
from bench.quick import LIMITS, Limit, main


def falling_cost(case: Case) -> MeasureOnce:
    """A cost that falls from run to run, like a warmup."""
    costs = iter((30.0, 20.0))
    return lambda: {"cost": next(costs)}


SMALL: Case = {"new_tokens": 8, "completion_tokens": 16, "episodes": 8}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.title)
def test_every_limit_can_be_measured(limit: Limit) -> None:
    """On a smaller case. The values themselves depend on the machine and are not tested."""
    case = {key: SMALL.get(key, value) for key, value in limit.case.items()}
    assert limit.prepare(case)()[limit.metric] > 0


@pytest.mark.parametrize(
    ("worst", "at_least", "status"), [(25.0, False, 0), (15.0, False, 1), (25.0, True, 0), (35.0, True, 1)]
)
def test_the_better_run_is_compared_with_the_limit(
    worst: float, at_least: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which run is better depends on whether the limit is a minimum."""
    limit = Limit(
        title="fake", prepare=falling_cost, case={}, metric="cost", unit="seconds", worst=worst, at_least=at_least
    )
    monkeypatch.setattr(quick, "LIMITS", (limit,))
    assert main([]) == status
    assert ("exceeded" in capsys.readouterr().out) == bool(status)
