"""Standard output and standard error never block, never fail and cannot be closed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from training_run.records.output import MAX_WAITING_WRITES, STDOUT, UnclosableText, WriteBehind

ROOT = Path(__file__).parents[3]

needs_full_device = pytest.mark.needs_linux(reason="/dev/full")


class Lost:
    """Records the reports of a stream."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int | None]] = []
        self.reported = threading.Event()

    def __call__(self, name: str, error: OSError) -> None:
        self.reports.append((name, error.errno))
        self.reported.set()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return the reading and the writing end of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with suppress(OSError):  # the test has closed it
            os.close(end)


def text(stream: WriteBehind, encoding: str = "utf-8") -> UnclosableText:
    """Return the text stream of `sys.stdout`."""
    return UnclosableText(stream, encoding=encoding, errors="backslashreplace", newline="\n", write_through=True)


def test_text_arrives_in_order(pipe: tuple[int, int]) -> None:
    """Also characters that the encoding lacks, as escapes."""
    stream = WriteBehind(pipe[1], STDOUT)
    out = text(stream, "ascii")
    out.write("one\n")
    out.write("tw\u00f6 \ud800\n")
    out.buffer.write(b"three\n")
    stream.drain(None)
    assert os.read(pipe[0], 100) == b"one\ntw\\xf6 \\ud800\nthree\n"
    assert stream.problem is None


def test_a_stream_that_user_code_closes_stays_open(pipe: tuple[int, int]) -> None:
    """Closing the text, the bytes, or the descriptor has no effect."""
    stream = WriteBehind(pipe[1], STDOUT)
    out = text(stream)
    out.close()
    out.buffer.close()
    os.close(pipe[1])
    out.write("still here\n")
    stream.drain(None)
    assert os.read(pipe[0], 100) == b"still here\n"
    assert not out.closed


def test_a_reader_that_has_gone_is_reported_once(pipe: tuple[int, int]) -> None:
    """Writes never raise. A report that is requested later is made at once."""
    stream, first, second = WriteBehind(pipe[1], STDOUT), Lost(), Lost()
    stream.on_problem(first)
    os.close(pipe[0])
    for _ in range(3):
        text(stream).write("lost\n")
    stream.drain(None)
    stream.on_problem(second)
    assert first.reports == second.reports == [(STDOUT, errno.EPIPE)]


@needs_full_device
def test_a_full_disk_is_reported_once() -> None:
    """Writes never raise."""
    with Path("/dev/full").open("wb") as full:
        stream, lost = WriteBehind(full.fileno(), STDOUT), Lost()
    stream.on_problem(lost)
    text(stream).write("lost\n")
    text(stream).write("lost\n")
    stream.drain(None)
    assert lost.reports == [(STDOUT, errno.ENOSPC)]


def test_a_closed_descriptor_is_reported_and_accepts_text(pipe: tuple[int, int]) -> None:
    """As after `>&-` in a shell."""
    os.close(pipe[1])
    stream, lost = WriteBehind(pipe[1], STDOUT), Lost()
    stream.on_problem(lost)
    text(stream).write("lost\n")
    stream.drain(None)
    assert lost.reports == [(STDOUT, errno.EBADF)]
    assert not stream.isatty()


def test_a_reader_that_does_not_read_never_blocks_the_writer(pipe: tuple[int, int]) -> None:
    """The queue is bounded: later text is dropped, which is reported once. The queued text arrives when it is read."""
    stream, lost = WriteBehind(pipe[1], STDOUT), Lost()
    stream.on_problem(lost)
    out = text(stream)
    page = 4096 * "x"
    for _ in range(3 * MAX_WAITING_WRITES):
        out.write(page)
    assert lost.reports == [(STDOUT, errno.EAGAIN)]
    stream.drain(0.0)
    os.close(pipe[1])
    received = 0
    while received < MAX_WAITING_WRITES * 4096:
        received += len(os.read(pipe[0], 1 << 20))
    assert received < 3 * MAX_WAITING_WRITES * 4096


def test_a_non_blocking_pipe_receives_everything(pipe: tuple[int, int]) -> None:
    """Another program may have made the descriptor non-blocking, so that a write fails while the pipe is full."""
    fcntl.fcntl(pipe[1], fcntl.F_SETFL, os.O_NONBLOCK)
    stream = WriteBehind(pipe[1], STDOUT)
    size = 300_000
    text(stream).write(size * "x")
    received = 0
    while received < size:
        received += len(os.read(pipe[0], 1 << 20))
    assert received == size
    assert stream.problem is None


PROGRAM = """
import os, sys
from training_run.records.output import Output
output = Output()
{code}
output.drain(None)
"""


def program(code: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run code after `Output` has replaced the standard streams."""
    command = f'exec "$0" -c "$1" {redirection}'
    arguments = ["sh", "-c", command, sys.executable, PROGRAM.format(code=code)]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "redirection", [">&- 2>&-", "<&- >&- 2>&-", pytest.param("> /dev/full 2>&1", marks=needs_full_device), "2>&-"]
)
def test_a_program_without_usable_streams_ends_well(redirection: str) -> None:
    """Also Python's own flush at the end of the process does not fail."""
    ended = program("print('text'); print('text', file=sys.stderr)", redirection)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_files_never_get_the_numbers_of_closed_standard_descriptors() -> None:
    """A library that prints to descriptor 1 would write into such a file."""
    ended = program("sys.exit(os.open(os.devnull, os.O_RDONLY))", "<&- >&- 2>&-")
    assert ended.returncode > 2


def test_a_forked_child_writes_too() -> None:
    """A child has no thread of its parent, and starts one."""
    child = "if os.fork() == 0: print('child'); output.drain(None); os._exit(0)"
    code = f"print('parent'); output.drain(None)\n{child}\nos.wait()"
    assert program(code, "").stdout == "parent\nchild\n"
