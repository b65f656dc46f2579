"""Standard output and standard error that never block, never fail and cannot be closed.

A reader that stops reading a pipe blocks `write`; a closed pipe, a closed terminal and a full disk make it fail. None
of this may affect training, so each stream has a thread that writes, and a bounded queue before it. If the queue is
full, text is dropped. A reward function that closes `sys.stdout` closes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TextIO

MAX_WAITING_WRITES = 256
"""Maximum number of writes in the queue of a stream. The live display writes a frame at once."""

FIRST_FREE_DESCRIPTOR = 3

STDOUT, STDERR = "standard output", "standard error"

ProblemReport = Callable[[str, OSError], None]
"""Receives the name of a stream, and the first reason why it lost text."""


class WriteBehind(io.RawIOBase):
    """A binary stream whose writes are appended to a queue and made by a daemon thread.

    problem: why text was lost, if any was; the first reason only.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        """descriptor: duplicated, so that the stream outlives the descriptor. name: for messages."""
        self.name = name
        self.problem: OSError | None = None
        self._number = descriptor
        self._on_problem: ProblemReport | None = None
        self._waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None
        try:
            self._descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_DESCRIPTOR)
        except OSError as error:
            self._descriptor, self.problem = -1, error
        os.register_at_fork(after_in_child=self._start_again)

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._descriptor >= 0 and os.isatty(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor that the stream replaces."""
        return self._number

    def close(self) -> None:
        """Do nothing: the stream stays open to the end of the process."""

    def write(self, data: object) -> int:
        """Append to the queue, and return the number of bytes. Never blocks, and never raises OSError."""
        text = bytes(data)  # type: ignore[call-overload]
        if self._thread is None:
            self._start()
        if self._waiting.qsize() < MAX_WAITING_WRITES:
            self._waiting.put(text)
        else:
            self._lose(BlockingIOError(errno.EAGAIN, "the reader does not read"))
        return len(text)

    def drain(self, seconds: float | None) -> None:
        """Wait until everything is written, for at most this time. None: without a limit."""
        if self._thread is not None:
            written = threading.Event()
            self._waiting.put(written)
            written.wait(seconds)

    def on_problem(self, report: ProblemReport | None) -> None:
        """Call `report` when text is lost for the first time, or now if text has been lost."""
        self._on_problem = report
        if self.problem is not None and report is not None:
            report(self.name, self.problem)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._write_all, name=self.name, daemon=True)
        self._thread.start()

    def _write_all(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write_one(item)

    def _write_one(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                try:
                    written += os.write(self._descriptor, data[written:])
                except BlockingIOError:  # another program made the descriptor non-blocking
                    select.select([], [self._descriptor], [])
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if self.problem is None:
            self.problem = error
            if self._on_problem is not None:
                self._on_problem(self.name, error)

    def _start_again(self) -> None:
        """Forget the thread, which a forked child does not have."""
        self._waiting, self._thread = SimpleQueue(), None


class UnclosableText(io.TextIOWrapper):
    """A text stream that `close` leaves open. Characters that the encoding lacks are replaced."""

    def close(self) -> None:
        """Flush."""
        self.flush()


class Output:
    """Standard output and standard error of the process, from now on."""

    def __init__(self) -> None:
        """Replace `sys.stdout` and `sys.stderr`. Closed descriptors are opened on /dev/null."""
        self.stdout, self.stderr = WriteBehind(1, STDOUT), WriteBehind(2, STDERR)
        _open_standard_descriptors()
        sys.stdout = _text(self.stdout, sys.stdout, "replace")
        sys.stderr = _text(self.stderr, sys.stderr, "backslashreplace")

    def drain(self, seconds: float | None) -> None:
        """Wait until everything is written, for at most this time per stream. None: without a limit."""
        self.stdout.drain(seconds)
        self.stderr.drain(seconds)


def on_output_problem(report: ProblemReport | None) -> None:
    """Call `report` when a standard stream loses text for the first time, or now if it has. None: no more calls.

    Without `Output`, as in another program, nothing is ever reported.
    """
    for stream in (sys.stdout, sys.stderr):
        writer = getattr(stream, "buffer", None)
        if isinstance(writer, WriteBehind):
            writer.on_problem(report)


def _text(stream: WriteBehind, replaced: TextIO | None, errors: str) -> UnclosableText:
    encoding = replaced.encoding if replaced is not None else "utf-8"
    return UnclosableText(stream, encoding=encoding, errors=errors, newline="\n", write_through=True)


def _open_standard_descriptors() -> None:
    """Open /dev/null for closed standard descriptors, because a file opened later would get their numbers."""
    for number in range(FIRST_FREE_DESCRIPTOR):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
