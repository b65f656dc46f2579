"""The clock of a contender's process."""

from __future__ import annotations

import sys
import time

import pytest

from bench.contenders import loop


def test_a_process_is_busy_from_its_start_but_for_what_it_waits_for_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started at 100 s, ready at 103, given a case after ten seconds each time, and two seconds over each."""
    now = [103.0]

    class Slow:
        cases = iter(["{}\n", "{}\n", ""])

        def readline(self) -> str:
            now[0] += 10
            return next(self.cases)

    monkeypatch.setattr(loop, "_launched", 100.0)
    monkeypatch.setattr(loop, "_waited", 0.0)
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(sys, "stdin", Slow())
    found = []
    for _ in loop._lines():
        now[0] += 2
        found.append(loop.busy_seconds())
    assert found == [5.0, 7.0]
