"""The clock of a contender's process."""

from __future__ import annotations

import sys
import time

import pytest

from bench.contenders import worker


def test_waiting_for_cases_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start at 100 s, ready at 103 s; each case arrives after ten seconds and takes two."""
    now = [103.0]

    class Slow:
        cases = iter(["{}\n", "{}\n", ""])

        def readline(self) -> str:
            now[0] += 10
            return next(self.cases)

    monkeypatch.setattr(worker, "_launched", 100.0)
    monkeypatch.setattr(worker, "_waited", 0.0)
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(sys, "stdin", Slow())
    found = []
    for _ in worker._lines():
        now[0] += 2
        found.append(worker.busy_seconds())
    assert found == [5.0, 7.0]
