"""log.jsonl, and the little of it that a person sees."""

from __future__ import annotations

import errno
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import structlog
from rich.console import Console

from clotho.monitoring.event_log import journal
from clotho.storage.jsonl_writer import LineWriter


def events(path: Path) -> list[dict[str, Any]]:
    """Every event, parsed."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def terminal() -> tuple[Console, io.StringIO]:
    """A console of 80 columns and what is written to it."""
    screen = io.StringIO()
    return Console(file=screen, width=80), screen


def test_events_are_lines_with_their_bound_names(tmp_path: Path) -> None:
    """On the terminal there are only warnings: one short line, markup and escapes shown as they are."""
    console, screen = terminal()
    log = structlog.get_logger("module", actor="learner")
    with journal(tmp_path / "log.jsonl", console):
        log.debug("too_fine")
        log.info("step", version=7, loss=float("nan"), text="\ud800")
        log.warning("[red]drift[/]", largest=0.07, text="\x1b[2J" + "x" * 500)
    found = events(tmp_path / "log.jsonl")
    assert [event["event"] for event in found] == ["step", "[red]drift[/]"]
    assert found[0]["actor"] == "learner"
    assert found[0]["logger"] == "module"
    assert found[0]["level"] == "info"
    assert found[0]["loss"] is None
    assert list(found[0])[:3] == ["time", "level", "event"]
    assert screen.getvalue().startswith("warning: learner: [red]drift[/] largest=0.07 text=·[2Jxxx")
    assert screen.getvalue().count("\n") == 1
    assert "\x1b" not in screen.getvalue()


def test_exceptions_are_whole_in_the_file_and_short_on_the_terminal(tmp_path: Path) -> None:
    """A traceback helps whoever reads the file."""
    console, screen = terminal()
    with journal(tmp_path / "log.jsonl", console):
        try:
            raise ValueError("no such thing")
        except ValueError:
            structlog.get_logger(actor="scorer").error("failed", exc_info=True)
    assert "Traceback" in events(tmp_path / "log.jsonl")[0]["exception"]
    assert screen.getvalue() == "error: scorer: failed ValueError: no such thing\n"


def test_the_librarys_logging_and_warnings_arrive_too_and_everything_is_put_back(tmp_path: Path) -> None:
    """Servers and model libraries use the standard library; only their warnings count."""
    console, _ = terminal()
    before, handlers = structlog.get_config(), list(logging.getLogger().handlers)
    with journal(tmp_path / "log.jsonl", console):
        logging.getLogger("hypercorn.error").info("chatter")
        logging.getLogger("hypercorn.error").warning("slow %s", "client")
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    found = events(tmp_path / "log.jsonl")
    assert [event["logger"] for event in found] == ["hypercorn.error", "py.warnings"]
    assert found[0]["message"] == "slow client"
    assert "old thing" in found[1]["message"]
    assert structlog.get_config() == before
    assert logging.getLogger().handlers == handlers


def test_a_full_disk_costs_events_but_nobody_who_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, and counted at the end."""

    def fail(self: LineWriter, record: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LineWriter, "append", fail)
    console, screen = terminal()
    with journal(tmp_path / "log.jsonl", console):
        for _ in range(3):
            structlog.get_logger().info("step")
    assert screen.getvalue().splitlines() == [
        "log.jsonl cannot be written, events are lost: [Errno 28] No space left on device",
        "log.jsonl lacks 3 events",
    ]
