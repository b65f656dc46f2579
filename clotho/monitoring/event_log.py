"""RUN_DIR/log.jsonl: every event with its bound names; on the terminal, only warnings, one short line each."""

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

from clotho.monitoring.terminal_text import visible
from clotho.storage.jsonl_writer import LineWriter

ON_TERMINAL = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
HIDDEN = ("time", "level", "event", "actor", "logger", "exception")
LINE_LIMIT = 240
"""Characters of a warning on the terminal; the file has all of it."""


@contextmanager
def journal(path: Path, console: Console) -> Iterator[None]:
    """Within the block, structlog and the standard library's logging write to `path`; before and after, as they did.

    Raises RunDirectoryError if the file cannot be opened. Later it may fail (a full disk): events are then lost,
    which is said once, and nobody who logs hears of it.
    """
    sink = Sink(LineWriter(path), console)
    before = structlog.get_config()
    handler = _Forward()
    root, level = logging.getLogger(), logging.getLogger().level
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            _logger_name,
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
        root.setLevel(level)
        structlog.configure(**before)
        sink.close()


class Sink:
    """Where events go. Never raises: whoever logs has better things to do than to fail for it."""

    def __init__(self, writer: LineWriter, console: Console) -> None:
        self._writer, self._console = writer, console
        self._lost, self._lock = 0, threading.Lock()

    def write(self, event: EventDict) -> None:
        """Put an event into the file; time, level and event come first."""
        first = {key: event[key] for key in ("time", "level", "event") if key in event}
        try:
            self._writer.append({**first, **event})
        except (OSError, ValueError) as error:
            with self._lock:
                self._lost += 1
                first_loss = self._lost == 1
            if first_loss:
                self._say(f"{self._writer.path.name} cannot be written, events are lost: {error}", "yellow")

    def show(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        """Processor: print a warning or worse as one line."""
        if style := ON_TERMINAL.get(event.get("level", "")):
            who = event.get("actor") or event.get("logger")
            numbers = " ".join(f"{key}={value}" for key, value in event.items() if key not in HIDDEN)
            cause = str(event.get("exception", "")).strip().splitlines()[-1:]
            parts = [f"{event['level']}:", f"{who}:" if who else "", str(event.get("event")), numbers, *cause]
            self._say(" ".join(part for part in parts if part), style)
        return event

    def close(self) -> None:
        """Close the file, and say how much it lacks."""
        self._writer.close()
        if self._lost:
            self._say(f"{self._writer.path.name} lacks {self._lost} events", "yellow")

    def _say(self, line: str, style: str) -> None:
        self._console.print(Text(visible(line, LINE_LIMIT), style=style), soft_wrap=True)


class _Logger:
    """What structlog's loggers end in: one method per level, all the same."""

    def __init__(self, sink: Sink, name: str | None) -> None:
        self.sink, self.name = sink, name

    def msg(self, event: EventDict) -> None:
        """Write a processed event."""
        self.sink.write(event)

    debug = info = warning = warn = error = critical = fatal = exception = log = failure = err = msg


def _logger_name(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if logger.name:
        event.setdefault("logger", logger.name)
    return event


def _as_arguments(logger: WrappedLogger, method: str, event: EventDict) -> tuple[tuple[EventDict], dict[str, Any]]:
    return (event,), {}


class _Forward(logging.Handler):
    """Records of the standard library's logging (servers, model libraries, Python warnings) as events."""

    def emit(self, record: logging.LogRecord) -> None:
        """Forward one record; an error in its own formatting is the handler's to report."""
        try:
            message = record.getMessage()
        except Exception:
            self.handleError(record)
            return
        structlog.get_logger(record.name).log(record.levelno, "message", message=message, exc_info=record.exc_info)
