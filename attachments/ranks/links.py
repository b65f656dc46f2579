"""Connections between rank 0 and each other rank: messages over TCP, with heartbeats in both directions.

A rank that waits for work waits for a message, and not in a collective. A process that ends closes its connections,
which the other side notices at once; a process that hangs is noticed because its heartbeats stop.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

HEADER = struct.Struct("<Q")
"""The header of a message: its number of bytes; 0 is a heartbeat."""

SIGN_SECONDS = 0.5
"""Time between two heartbeats."""
SUSPENDED_SECONDS = 2.0
"""A process whose periodic check is this late was suspended itself; silence of others in this time means nothing."""
CLOSE_SECONDS = 2.0
CHUNK = 1 << 20


class Link:
    """A connection to another rank. seen: time of the last bytes from it, in monotonic seconds."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        *,
        receive: Callable[[int, bytes], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """receive: called with every message, in a thread. lost: called once if the connection ends."""
        self.rank, self.seen = rank, time.monotonic()
        self._connection, self._receive, self._lost = connection, receive, lost
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._closing = False
        connection.settimeout(None)
        self._writer = threading.Thread(target=self._write, name=f"to rank {rank}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"from rank {rank}", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: bytes) -> None:
        """Send a message; returns at once."""
        self._outbox.put(message)

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Send the remaining messages, for at most so long, and close the connection."""
        self._closing = True
        self._outbox.put(None)
        self._writer.join(seconds)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _write(self) -> None:
        while True:
            try:
                message = self._outbox.get(timeout=SIGN_SECONDS)
            except Empty:
                message = b""
            if message is None:
                return
            try:
                self._connection.sendall(HEADER.pack(len(message)))
                self._connection.sendall(message)
            except OSError as error:
                self._end(error)
                return

    def _read(self) -> None:
        try:
            while True:
                (length,) = HEADER.unpack(self._exactly(HEADER.size))
                if length:
                    self._receive(self.rank, self._exactly(length))
        except OSError as error:
            self._end(error)

    def _exactly(self, length: int) -> bytes:
        buffer = bytearray(length)
        view, filled = memoryview(buffer), 0
        while filled < length:
            count = self._connection.recv_into(view[filled : filled + CHUNK])
            if not count:
                raise ConnectionResetError
            self.seen = time.monotonic()
            filled += count
        return bytes(buffer)

    def _end(self, error: OSError) -> None:
        if not self._closing:
            self._lost(
                self.rank, f"closed its connection: {error.strerror}" if error.strerror else "closed its connection"
            )


class Watch:
    """Checks heartbeats and deadlines, in a thread.

    hang_seconds: a rank without a heartbeat for so long is lost.
    """

    def __init__(
        self,
        *,
        hang_seconds: float,
        alive: Callable[[], None],
        lost: Callable[[int | None, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """alive: called in every round. lost: called with a rank and a reason; None: some other rank."""
        self.hang_seconds = hang_seconds
        self._alive, self._lost, self._clock = alive, lost, clock
        self._links: tuple[Link, ...] = ()
        self._deadline: tuple[float, str] | None = None
        self._looked = clock()

    def start(self) -> None:
        """Check from now on, until the process ends."""
        threading.Thread(target=self._run, name="rank watch", daemon=True).start()

    def add(self, link: Link) -> None:
        """Expect heartbeats on a connection."""
        self._links = (*self._links, link)

    @contextmanager
    def deadline(self, seconds: float, reason: str) -> Iterator[None]:
        """Expect the end of the block within `seconds`; `reason` completes the sentence that names the other rank."""
        self._deadline = (self._clock() + seconds, reason)
        try:
            yield
        finally:
            self._deadline = None

    def look(self) -> None:
        """Check once."""
        now, before = self._clock(), self._looked
        self._looked = now
        suspended = now - before
        if suspended > SUSPENDED_SECONDS:
            for link in self._links:
                link.seen = now
            if (due := self._deadline) is not None:
                self._deadline = (due[0] + suspended, due[1])
            return
        for link in self._links:
            if now - link.seen > self.hang_seconds:
                self._lost(link.rank, f"sent no heartbeat for {self.hang_seconds:g} s")
        if (due := self._deadline) is not None and now > due[0]:
            self._lost(None, due[1])

    def _run(self) -> None:
        while True:
            self._alive()
            self.look()
            time.sleep(SIGN_SECONDS / 2)
