"""`python -m bench quick`: nothing has slipped by an order of magnitude."""

from __future__ import annotations

import pytest

from bench import quick
from bench.contenders.loop import Case, Once
from bench.quick import Limit, main


def falling(case: Case) -> Once:
    """Costs less from run to run, as what warms up does."""
    costs = iter((30.0, 20.0))
    return lambda: {"cost": next(costs)}


def test_nothing_has_slipped_by_an_order_of_magnitude(capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine, now, whatever else it does."""
    assert main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("worst", "at_least", "status"), [(25.0, False, 0), (15.0, False, 1), (25.0, True, 0), (35.0, True, 1)]
)
def test_the_better_run_is_held_against_the_limit(
    worst: float, at_least: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which of them is better depends on what a limit is: a floor, or a ceiling."""
    limit = Limit(title="fake", prepare=falling, case={}, metric="cost", unit="seconds", worst=worst, at_least=at_least)
    monkeypatch.setattr(quick, "LIMITS", (limit,))
    assert main([]) == status
    assert ("slipped" in capsys.readouterr().out) == bool(status)
