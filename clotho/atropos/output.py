"""What a process of ours prints: kept in a file that does not grow without bound, its last lines at hand."""

from __future__ import annotations

import os
import re
from collections import deque
from contextlib import suppress
from pathlib import Path

FILE_BYTES = 16 * 2**20
"""Beyond, the file becomes NAME.log.1, in place of an older one."""
LINE_BYTES = 65_536
"""A longer line is broken."""
LAST_LINES = 20
SHOWN_CHARACTERS = 200
MASK = b"********"
ENDS_OF_LINES = re.compile(rb"[\r\n]+")
ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")
"""How the last part of a traceback begins."""
ORNAMENTS = " \t\xb7^~|=-_*#"


class Output:
    """The file, and the last lines.

    path: of the file; only its owner can read it. secret: what is masked wherever it appears on one line.
    """

    def __init__(self, path: Path, *, secret: str = "") -> None:
        self.path = path
        self._secret = secret.encode()
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> None:
        """Append to the file from here on, and forget the last lines."""
        self.close()
        self._lines.clear()
        self._open()

    def write(self, chunk: bytes) -> list[str]:
        """Take what was printed next; the lines that are whole now."""
        *whole, self._rest = ENDS_OF_LINES.split(self._rest + chunk)
        while len(self._rest) > LINE_BYTES:
            whole.append(self._rest[:LINE_BYTES])
            self._rest = self._rest[LINE_BYTES:]
        return [self._keep(line) for line in whole if line]

    def close(self) -> None:
        """Write what is left; the second time does nothing."""
        if self._descriptor is None:
            return
        if self._rest:
            self._keep(self._rest)
            self._rest = b""
        os.close(self._descriptor)
        self._descriptor = None

    def last_words(self) -> str:
        """What it said at the end, on one line, cut: the error of a Python traceback, or the last line that says any.

        Empty if it said nothing.
        """
        spoken = [line.strip() for line in self._lines if line.strip(ORNAMENTS)]
        begins = [number for number, line in enumerate(spoken) if ERROR.match(line)]
        text = " ".join(spoken[begins[-1] if begins else -1 :])
        return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."

    def _keep(self, line: bytes) -> str:
        if self._secret:
            line = line.replace(self._secret, MASK)
        with suppress(OSError):  # a full disk is said by whoever must write there
            self._append(line + b"\n")
        text = "".join(c if c.isprintable() else "\xb7" for c in line.decode("utf-8", errors="replace"))
        self._lines.append(text)
        return text

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None, "opened before it is written to"
        if self._size and self._size + len(line) > FILE_BYTES:
            os.replace(self.path, f"{self.path}.1")
            before = self._descriptor
            self._open()  # where it fails, the old file goes on
            os.close(before)
        self._size += os.write(self._descriptor, line)

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._descriptor).st_size
