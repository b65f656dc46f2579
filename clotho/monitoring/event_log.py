"""Event log: log.jsonl has every event with its fields; the terminal shows warnings and errors, one short line each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.text import Text
from structlog.typing import EventDict, WrappedLogger

from clotho.monitoring.terminal_text import terminal_text
from clotho.storage.jsonl import JsonlWriter

TERMINAL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
"""Levels that the terminal shows, with their style."""

FIELDS_NOT_SHOWN = ("time", "level", "event", "actor", "logger", "exception")
LINE_LIMIT = 240
"""Maximum number of characters of an event on the terminal; the file has the complete event."""


@contextmanager
def event_log(path: Path, console: Console) -> Iterator[None]:
    """Within the block, structlog and the standard library's logging write to `path`; afterwards, as before.

    Raises RunDirectoryError if the file cannot be opened. If a later write fails (for example, on a full disk), events
    are lost, which the terminal shows once; the caller that logs is not affected.
    """
    sink = EventSink(JsonlWriter(path), console)
    config_before = structlog.get_config()
    handler = _ForwardHandler()
    root, level_before = logging.getLogger(), logging.getLogger().level
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            _add_logger_name,
            structlog.processors.format_exc_info,
            sink.show,
            _as_arguments,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        context_class=dict,
        logger_factory=lambda *names: _Logger(sink, names[0] if names else None),
        cache_logger_on_first_use=False,
    )
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(level_before)
        structlog.configure(**config_before)
        sink.close()


class EventSink:
    """Destination of all events: the file and the terminal. Never raises."""

    def __init__(self, writer: JsonlWriter, console: Console) -> None:
        self._writer, self._console = writer, console
        self._lost, self._lock = 0, threading.Lock()

    def write(self, event: EventDict) -> None:
        """Append an event to the file; time, level and event are the first keys."""
        first = {key: event[key] for key in ("time", "level", "event") if key in event}
        try:
            self._writer.append({**first, **event})
        except (OSError, ValueError) as error:
            with self._lock:
                self._lost += 1
                first_loss = self._lost == 1
            if first_loss:
                self._print(f"{self._writer.path.name} cannot be written, events are lost: {error}", "yellow")

    def show(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Structlog processor: show a warning or an error on the terminal as one line."""
        if style := TERMINAL_STYLES.get(event.get("level", "")):
            source = event.get("actor") or event.get("logger")
            fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in FIELDS_NOT_SHOWN)
            cause = str(event.get("exception", "")).strip().splitlines()[-1:]
            parts = [f"{event['level']}:", f"{source}:" if source else "", str(event.get("event")), fields, *cause]
            self._print(" ".join(part for part in parts if part), style)
        return event

    def close(self) -> None:
        """Close the file, and show the number of lost events."""
        self._writer.close()
        if self._lost:
            self._print(f"{self._writer.path.name} lacks {self._lost} events", "yellow")

    def _print(self, line: str, style: str) -> None:
        self._console.print(Text(terminal_text(line, LINE_LIMIT), style=style), soft_wrap=True)


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


def _as_arguments(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[EventDict], dict[str, Any]]:
    return (event,), {}


class _ForwardHandler(logging.Handler):
    """Forwards records of the standard library's logging (servers, model libraries, Python warnings) as events."""

    def emit(self, record: logging.LogRecord) -> None:
        """Forward one record."""
        try:
            message = record.getMessage()
        except Exception:
            self.handleError(record)
            return
        structlog.get_logger(record.name).log(record.levelno, "message", message=message, exc_info=record.exc_info)
