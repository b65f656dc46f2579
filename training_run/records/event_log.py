"""Event log: log.jsonl has every event with its fields; the terminal shows warnings and errors, one short line each."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog
from rich.console import Console
from structlog.typing import EventDict, WrappedLogger

from protocols.errors import error_text
from protocols.finding import Finding
from training_run.directory.jsonl import JsonlWriter
from training_run.directory.run_directory import PREVIOUS_LOG
from training_run.records.failure_report import complain
from training_run.records.output import STDOUT, on_output_problem
from training_run.records.terminal_text import finding_lines, print_line

TERMINAL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
"""Levels that the terminal shows, with their style."""

FINDING = "finding"
"""Name of the events that report a finding. `log_finding` creates them."""

FORWARDED = "message"
"""Name of the events that come from the standard library's logging."""

FIELDS_NOT_SHOWN = ("time", "level", "event", "actor", "logger", "exception")
LINE_LIMIT = 240
"""Maximum number of characters of an event on the terminal; the file has the complete event."""
COMMAND_LIMIT = 4000
"""Maximum number of characters of a line of a finding, because a command that is cut off is worthless."""


LOG_BYTES = 64 << 20
"""Size at which log.jsonl is renamed to log.1.jsonl; the log before it is deleted."""
TEXT_LIMIT = 20_000
"""Maximum number of characters of a field in the file."""
MAX_EARLY_EVENTS = 1000
"""Maximum number of events that are kept until the file is open."""


def log_finding(finding: Finding, *, actor: str = "monitor") -> None:
    """Log a finding as a warning or an error. The terminal shows all its parts."""
    log = structlog.get_logger(actor=actor)
    report = log.error if finding.severity == "error" else log.warning
    report(FINDING, **_parts(finding))


def log_finding_over(finding: Finding, *, actor: str = "monitor") -> None:
    """Log that a finding does not apply any more, with all its parts as they were last."""
    structlog.get_logger(actor=actor).info("finding_over", **_parts(finding))


def _parts(finding: Finding) -> dict[str, Any]:
    name, *fields = msgspec.to_builtins(finding).items()
    return {"finding": name[1], **{key: value for key, value in fields if value}}


@contextmanager
def event_log(console: Console) -> Iterator[EventSink]:
    """Within the block, structlog, the standard library's logging and uncaught exceptions of threads are events.

    Events go to the file once `EventSink.open` has been called. If a write fails (for example, on a full disk), events
    are lost, which the terminal shows once; the caller that logs is not affected. If the terminal cannot be written,
    one event says so.
    """
    sink = EventSink(console)
    config_before, hooks_before = structlog.get_config(), (threading.excepthook, sys.unraisablehook)
    handler = _ForwardHandler()
    root, level_before = logging.getLogger(), logging.getLogger().level
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            _add_logger_name,
            structlog.processors.format_exc_info,
            lambda logger, method, event: ((event,), {}),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        context_class=dict,
        logger_factory=lambda *names: _Logger(sink, names[0] if names else None),
        cache_logger_on_first_use=False,
    )
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    threading.excepthook, sys.unraisablehook = _log_thread_failure, _log_unraisable
    try:
        yield sink
    finally:
        on_output_problem(None)
        threading.excepthook, sys.unraisablehook = hooks_before
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(level_before)
        structlog.configure(**config_before)
        sink.close()


class EventSink:
    """Destination of all events: the file and the terminal. Never raises."""

    def __init__(self, console: Console, *, log_bytes: int = LOG_BYTES) -> None:
        """log_bytes: size of the file at which a new file is started."""
        self._console, self._log_bytes = console, log_bytes
        self._writer: JsonlWriter | None = None
        self._name, self._lost, self._lock = "", 0, threading.RLock()
        self._early: list[EventDict] = []

    @property
    def lost(self) -> int:
        """Number of events that the file lacks."""
        return self._lost

    def open(self, path: Path) -> None:
        """Open the file and write the events so far. Raises RunDirectoryError if the file cannot be opened."""
        with self._lock:
            self._writer, self._name = JsonlWriter(path, terminal_safe=True), path.name
            early, self._early = self._early, []
            for event in early:
                self._append(event)
                if _is_forwarded(event):
                    self._show(event)
        on_output_problem(_log_lost_output)

    def write(self, event: EventDict) -> None:
        """Append an event to the file, and show a warning or an error on the terminal as one line.

        Before `open`, events of other libraries are not shown, because a refused start is one line on the terminal.
        """
        with self._lock:
            if self._writer is not None:
                self._append(event)
            elif len(self._early) < MAX_EARLY_EVENTS:
                self._early.append(event)
        if self._writer is not None or not _is_forwarded(event):
            self._show(event)

    def close(self) -> None:
        """Close the file, and show the number of lost events."""
        if self._writer is not None:
            self._writer.close()
        if self._lost:
            self._print(f"{self._name} lacks {self._lost} events", "yellow")

    def _append(self, event: EventDict) -> None:
        """Append to the file; time, level and event are the first keys."""
        assert self._writer is not None
        first = {key: event[key] for key in ("time", "level", "event") if key in event}
        try:
            if self._writer.size > self._log_bytes:
                self._rotate(self._writer)
            self._writer.append({key: _shortened(key, value) for key, value in {**first, **event}.items()})
        except Exception as error:  # a value can also fail to be encoded
            self._lost += 1
            if self._lost == 1:
                self._print(f"{self._name} cannot be written, events are lost: {error_text(error)}", "yellow")

    def _rotate(self, writer: JsonlWriter) -> None:
        os.replace(writer.path, writer.path.with_name(PREVIOUS_LOG))
        self._writer = JsonlWriter(writer.path, terminal_safe=True)
        writer.close()

    def _show(self, event: EventDict) -> None:
        style = TERMINAL_STYLES.get(event.get("level", ""))
        if style is None:
            return
        if event.get("event") == FINDING:
            self._show_finding(event, style)
            return
        with suppress(Exception):  # a field whose str() fails
            source = event.get("actor") or event.get("logger")
            fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in FIELDS_NOT_SHOWN)
            cause = str(event.get("exception", "")).strip().splitlines()[-1:]
            parts = [f"{event['level']}:", f"{source}:" if source else "", str(event.get("event")), fields, *cause]
            self._print(" ".join(part for part in parts if part), style)

    def _show_finding(self, event: EventDict, style: str) -> None:
        """Show all parts of a finding, because the remedy is as important as the fact."""
        with suppress(Exception):
            finding = msgspec.convert({**event, "name": event["finding"]}, Finding)
            for line in finding_lines(finding, self._console.width):
                self._print(line, style, limit=COMMAND_LIMIT)

    def _print(self, line: str, style: str, *, limit: int = LINE_LIMIT) -> None:
        with suppress(Exception, SystemExit):  # rich raises SystemExit for a closed pipe
            print_line(self._console, line, style=style, limit=limit)


def _is_forwarded(event: EventDict) -> bool:
    return event.get("event") == FORWARDED


def _shortened(key: str, value: object) -> object:
    limit = 10 * TEXT_LIMIT if key == "exception" else TEXT_LIMIT
    return f"{value[: limit // 2]}…{value[-limit // 2 :]}" if isinstance(value, str) and len(value) > limit else value


def _log_lost_output(stream: str, error: OSError) -> None:
    """Report the loss of a standard stream: in the event log, and on stderr if only standard output is lost."""
    structlog.get_logger(actor="terminal").warning("output_lost", stream=stream, error=error.strerror)
    if stream == STDOUT:
        complain(f"{stream} cannot be written ({error.strerror}): the run continues without it")


def _log_thread_failure(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is not SystemExit and failure.exc_value is not None:
        name = failure.thread.name if failure.thread else ""
        structlog.get_logger().error("thread_failed", thread=name, exc_info=failure.exc_value)


def _log_unraisable(failure: sys.UnraisableHookArgs) -> None:
    where = getattr(failure.object, "__qualname__", type(failure.object).__name__)
    structlog.get_logger().warning("exception_ignored", where=where, exc_info=failure.exc_value)


class _Logger:
    """The wrapped logger of structlog: one method per level, all with the same effect."""

    def __init__(self, sink: EventSink, name: str | None) -> None:
        self.sink, self.name = sink, name

    def msg(self, event: EventDict) -> None:
        """Write a processed event."""
        self.sink.write(event)

    debug = info = warning = warn = error = critical = fatal = exception = log = failure = err = msg


def _add_logger_name(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if logger.name:
        event.setdefault("logger", logger.name)
    return event


class _ForwardHandler(logging.Handler):
    """Forwards records of the standard library's logging (servers, model libraries, Python warnings) as events."""

    def emit(self, record: logging.LogRecord) -> None:
        """Forward one record."""
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit the message
            message = str(record.msg)
        structlog.get_logger(record.name).log(record.levelno, FORWARDED, message=message, exc_info=record.exc_info)
