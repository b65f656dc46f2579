"""Progress lines of a command say what it does, and the time that it has."""

from __future__ import annotations

import io

import pytest
from anyio.lowlevel import checkpoint
from rich.console import Console

from attachments.doctor import progress
from attachments.doctor.progress import Progress


def printed(seconds: float) -> tuple[Progress, io.StringIO]:
    """Work with so much time, and what it prints."""
    out = io.StringIO()
    return Progress(Console(file=out, width=100), seconds), out


async def test_a_phase_has_a_line_at_its_begin() -> None:
    """Nothing is printed after `stop`."""
    work, out = printed(60.0)
    work.phase("loading")
    work.stop()
    assert [line.rpartition("  ")[2] for line in out.getvalue().splitlines()] == ["loading"]


async def test_a_long_phase_has_further_lines_that_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next phase, which begins without a remark."""
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    work, out = printed(60.0)
    work.phase("drawing")
    work.note("3 are finished")
    while "drawing: 3 are finished" not in out.getvalue():
        await checkpoint()
    work.phase("updating")
    work.stop()
    assert out.getvalue().endswith("updating\n")


async def test_a_phase_for_which_no_time_is_left_is_cut_off() -> None:
    """The time begins with `start`."""
    work, _ = printed(60.0)
    work.start()
    assert work.reached("drawing")
    spent, _ = printed(0.0)
    spent.start()
    assert not spent.reached("updating")
    assert spent.cut_off == ["updating"]
    assert work.cut_off == []
    work.stop()
