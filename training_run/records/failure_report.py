"""How the program reports a failure: one line on stderr; the traceback of an unexpected error goes to a file."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from datetime import UTC
from pathlib import Path

from protocols.errors import ClothoError, error_text, visible

COMPLAINT_LIMIT = 1000
"""Maximum number of characters of a line on stderr."""

OUT_OF_MEMORY = (
    "the system refused to give this process more memory: raise its limit (ulimit -v), end other programs, or choose "
    "smaller settings (--dry-run prints the memory estimate)"
)

TRACEBACK_LIMIT = 200_000
"""Maximum number of characters of a traceback; the end is kept."""


def report(error: BaseException, *, log: Path | None = None) -> int:
    """Print one line on stderr, with an indented line per note of the error, and return the exit status.

    The traceback of an unexpected error, or of the unexpected cause of a ClothoError, is appended to the event log. If
    there is no event log yet, a temporary file receives it. log: path of the event log.
    """
    message, notes = error_text(error), getattr(error, "__notes__", ())
    status, unexpected = 1, error
    if isinstance(error, ClothoError):
        status, cause = error.exit_status, error.__cause__
        if status == 2 or cause is None or isinstance(cause, ClothoError):
            complain(message, *notes)
            return status
        unexpected = cause
    elif isinstance(error, MemoryError):
        message = f"{OUT_OF_MEMORY}{f' ({message})' if message else ''}"
    else:
        message = f"internal error: {type(error).__name__}: {message}"
    trace = "".join(traceback.format_exception(unexpected))[-TRACEBACK_LIMIT:]
    place = _record(trace, log)
    if place is None:
        complain(message, *notes, *trace.splitlines())
    else:
        complain(f"{message}; the traceback is in {place}", *notes)
    return status


def complain(message: str, *notes: str) -> None:
    """Print one line on stderr, and one indented line per note. The text can quote input."""
    for line in (f"clotho: {message}", *(f"  {note}" for note in notes)):
        sys.stderr.write(visible(line, COMPLAINT_LIMIT, keep_end=COMPLAINT_LIMIT // 2) + "\n")


def _record(trace: str, log: Path | None) -> Path | None:
    """Write a traceback to the event log or to a temporary file, and return its path; None if neither is possible."""
    if log is not None and log.exists():
        try:
            _append_event(trace, log)
        except (ClothoError, OSError):
            pass
        else:
            return log
    try:
        descriptor, name = tempfile.mkstemp(prefix="clotho-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
    except OSError:
        return None
    return Path(name)


def _append_event(trace: str, log: Path) -> None:
    from datetime import datetime

    from training_run.directory.jsonl import JsonlWriter

    writer = JsonlWriter(log, terminal_safe=True)
    try:
        now = datetime.now(UTC).isoformat()
        writer.append({"time": now, "level": "critical", "event": "run_failed", "exception": trace})
    finally:
        writer.close()
