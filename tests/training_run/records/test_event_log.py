"""Event log: the file, and the warnings on the terminal."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import structlog
from rich.console import Console

from protocols.errors import visible
from protocols.finding import CHECK, Finding
from training_run.directory.jsonl import JsonlWriter
from training_run.records.event_log import EventSink, event_log, log_finding


def events(path: Path) -> list[dict[str, Any]]:
    """Return all events of a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def terminal() -> tuple[Console, io.StringIO]:
    """Return a console of 80 columns and its output."""
    screen = io.StringIO()
    return Console(file=screen, width=80), screen


def test_events_are_lines_with_their_fields(tmp_path: Path) -> None:
    """The terminal shows warnings only: one short line, with markup and escapes as text."""
    console, screen = terminal()
    log = structlog.get_logger("module", actor="learner")
    with event_log(console) as sink:
        sink.open(tmp_path / "log.jsonl")
        log.debug("debug_event")
        log.info("step", version=7, loss=float("nan"), text="\ud800")
        log.warning("[red]drift[/]", largest=0.07, text="\x1b[2J" + "x" * 500)
    found = events(tmp_path / "log.jsonl")
    assert [event["event"] for event in found] == ["step", "[red]drift[/]"]
    assert found[0]["actor"] == "learner"
    assert found[0]["logger"] == "module"
    assert found[0]["level"] == "info"
    assert found[0]["loss"] is None
    assert list(found[0])[:3] == ["time", "level", "event"]
    assert screen.getvalue().startswith("warning: learner: [red]drift[/] largest=0.07 text=\\x1b[2Jxxx")
    assert screen.getvalue().count("\n") == 1
    assert "\x1b" not in screen.getvalue()


def test_the_file_can_be_shown_on_a_terminal(tmp_path: Path) -> None:
    """Control and format characters are JSON escapes, also in keys and beyond U+FFFF. The values are unchanged."""
    hostile = "\x1b[2J\x7f\x9b\u202e\u2066\u200b\U000e0041é✓"
    with event_log(terminal()[0]) as sink:
        sink.open(tmp_path / "log.jsonl")
        structlog.get_logger().info("step", text=hostile, **{"\u009bkey": 1})
    text = (tmp_path / "log.jsonl").read_text(encoding="utf-8")
    assert visible(text[:-1], 1000) == text[:-1]
    assert "é✓" in text
    (event,) = events(tmp_path / "log.jsonl")
    assert (event["text"], event["\u009bkey"]) == (hostile, 1)


def test_an_exception_without_text_loses_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`str()` of the exception that a write raises can fail; the caller that logs is not affected."""

    def refuse(self: JsonlWriter, record: object) -> None:
        raise SilentError

    monkeypatch.setattr(JsonlWriter, "append", refuse)
    with event_log(terminal()[0]) as sink:
        sink.open(tmp_path / "log.jsonl")
        structlog.get_logger().info("step")
    assert sink.lost == 1


class SilentError(Exception):
    """An exception whose str() fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


def test_exceptions_are_complete_in_the_file_and_short_on_the_terminal(tmp_path: Path) -> None:
    """The file has the traceback."""
    console, screen = terminal()
    with event_log(console) as sink:
        sink.open(tmp_path / "log.jsonl")
        try:
            raise ValueError("no such thing")
        except ValueError:
            structlog.get_logger(actor="scorer").error("failed", exc_info=True)
    assert "Traceback" in events(tmp_path / "log.jsonl")[0]["exception"]
    assert screen.getvalue() == "error: scorer: failed ValueError: no such thing\n"


def test_standard_logging_is_forwarded_and_the_configuration_is_restored(tmp_path: Path) -> None:
    """Only records of level warning and above, and Python warnings."""
    console, _ = terminal()
    before, handlers = structlog.get_config(), list(logging.getLogger().handlers)
    with event_log(console) as sink:
        sink.open(tmp_path / "log.jsonl")
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


def test_a_full_disk_loses_events_without_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal shows the first loss and the total."""

    def fail(self: JsonlWriter, record: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonlWriter, "append", fail)
    console, screen = terminal()
    with event_log(console) as sink:
        sink.open(tmp_path / "log.jsonl")
        for _ in range(3):
            structlog.get_logger().info("step")
    assert screen.getvalue().splitlines() == [
        "log.jsonl cannot be written, events are lost: [Errno 28] No space left on device",
        "log.jsonl lacks 3 events",
    ]


class BrokenScreen(io.StringIO):
    """A terminal that has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_broken_terminal_does_not_affect_the_caller_or_the_file(tmp_path: Path) -> None:
    """Also a field whose str() fails."""

    class UnprintableField:
        def __str__(self) -> str:
            raise RuntimeError

    with event_log(Console(file=BrokenScreen())) as sink:
        sink.open(tmp_path / "log.jsonl")
        structlog.get_logger().warning("first")
        structlog.get_logger().warning("second", field=UnprintableField())
        structlog.get_logger().warning("third")
        assert sink.lost == 1
    assert [event["event"] for event in events(tmp_path / "log.jsonl")] == ["first", "third"]


def test_events_before_the_file_is_open_are_written_first(tmp_path: Path) -> None:
    """Warnings of other libraries are shown when the start has succeeded, because a refused start is one line."""
    console, screen = terminal()
    with event_log(console) as sink:
        structlog.get_logger(actor="pipeline").warning("own")
        logging.getLogger("library").warning("foreign %d", 1)
        assert screen.getvalue() == "warning: pipeline: own\n"
        sink.open(tmp_path / "log.jsonl")
        structlog.get_logger().info("later")
    assert [event["event"] for event in events(tmp_path / "log.jsonl")] == ["own", "message", "later"]
    assert "foreign" in screen.getvalue()


def test_the_size_of_the_log_is_bounded(tmp_path: Path) -> None:
    """At its maximum size the file is renamed; the one before it is deleted. A long field is shortened."""
    console, _ = terminal()
    sink = EventSink(console, log_bytes=1000)
    sink.open(tmp_path / "log.jsonl")
    for number in range(100):
        sink.write({"event": "step", "number": number})
    sink.write({"event": "long", "text": "x" * 5_000_000})
    sink.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.1.jsonl", "log.jsonl"]
    numbers = [event.get("number") for name in ("log.1.jsonl", "log.jsonl") for event in events(tmp_path / name)]
    assert numbers == [*range(100 - len(numbers) + 1, 100), None]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 50_000


def test_uncaught_exceptions_of_threads_are_events(tmp_path: Path) -> None:
    """Without the log, Python prints a traceback on stderr."""
    console, screen = terminal()
    hooks = threading.excepthook, sys.unraisablehook

    def fail() -> None:
        raise ValueError("in a thread")

    class FailingFinalizer:
        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    with event_log(console) as sink:
        sink.open(tmp_path / "log.jsonl")
        thread = threading.Thread(target=fail, name="worker")
        thread.start()
        thread.join()
        FailingFinalizer()
    found = events(tmp_path / "log.jsonl")
    assert [event["event"] for event in found] == ["thread_failed", "exception_ignored"]
    assert found[0]["thread"] == "worker"
    assert all("Traceback" in event["exception"] for event in found)
    assert screen.getvalue().count("\n") == 2
    assert (threading.excepthook, sys.unraisablehook) == hooks


def test_a_finding_is_shown_with_its_remedy_in_lines_of_the_width_of_the_terminal(tmp_path: Path) -> None:
    """The file has one event with all parts. Markup and escapes of the model's text are shown as text.

    The command is a whole line, so that it can be copied.
    """
    console, screen = terminal()
    finding = Finding(
        name="no_reward", severity="error", fact="every reward is 0 " * 12, consequence="nothing is learned",
        advice="state the format in data.system " * 5, example="[bold]\x1b[2J" + "x" * 200, remedy=CHECK,
        command=f"clotho doctor --profile {'p' * 300}.toml",
    )  # fmt: skip
    with event_log(console) as sink:
        sink.open(tmp_path / "log.jsonl")
        log_finding(finding)
    (event,) = events(tmp_path / "log.jsonl")
    assert (event["event"], event["finding"], event["level"]) == ("finding", "no_reward", "error")
    assert (event["fact"], event["command"]) == (finding.fact, finding.command)
    shown = screen.getvalue()
    assert shown.startswith("error: no_reward: every reward is 0")
    assert "\n  nothing is learned\n  do: state the format in data.system" in shown
    assert "\x1b" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "xxx" not in line and "ppp" not in line)
    assert f"  then check: {finding.command}" in shown.splitlines()
