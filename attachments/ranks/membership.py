"""The membership of this process in the group of ranks: joining, messages, sums of gradients, and losing a rank."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import mlx.core as mx
import numpy as np
import structlog
from numpy.typing import NDArray

from attachments.ranks.links import Link, Watch
from attachments.ranks.messages import Lost, encode
from attachments.ranks.sections import DistributedSection
from attachments.ranks.supervision import CONNECTION, RANK_LOST
from attachments.ranks.supervision import rank as supervision_rank
from protocols.errors import ProfileError
from training_run.supervision.restarting import SupervisorLink

log = structlog.get_logger(actor="learner")

PIECE = 1 << 21
"""Number of float32 values that one collective adds: 8 MB, so that its duration does not depend on the model."""

CONNECT_SECONDS = 20.0
"""Time in which the ranks must connect after they have joined the group."""

TOKEN = struct.Struct("<16sI")
"""What a rank sends when it connects: the token that rank 0 has given to all ranks, and its rank."""


def coordinator(environment: Mapping[str, str]) -> str:
    """Return the address of rank 0 from the variables that `mlx.launch` sets. Raises ProfileError without one."""
    if host := environment.get("NCCL_HOST_IP"):
        return host
    if place := environment.get("MLX_JACCL_COORDINATOR"):
        return place.rpartition(":")[0].strip("[]")
    if path := environment.get("MLX_HOSTFILE"):
        with open(path, encoding="utf-8") as file:
            hosts = json.loads(file.read() or "[]")
        if hosts:
            first = hosts[0][0] if isinstance(hosts[0], list) else hosts[0]
            return str(first).rpartition(":")[0].strip("[]")
    raise ProfileError("the address of rank 0 is not known: start the ranks with mlx.launch, backend ring or jaccl")


class Membership:
    """This process in the group of ranks. rank: of this process. size: number of ranks, at least 2.

    Collectives run in the thread that constructs the object. Their stream is that of the CPU, because the GPU driver of
    macOS ends work that waits for another rank for more than some seconds; with NCCL, it is that of the GPU.
    """

    def __init__(
        self,
        settings: DistributedSection,
        *,
        receive: Callable[[int, bytes], None],
        exit_process: Callable[[int], NoReturn],
    ) -> None:
        """Join; the process ends if the other ranks do not. receive: called with every message, in a thread.

        exit_process: ends the process with a status, in any thread.
        """
        self.settings = settings
        self.rank, self.size = supervision_rank(), 0
        self._receive, self._exit = receive, exit_process
        self._links: dict[int, Link] = {}
        self._ending = threading.Lock()  # held from the first reason to end the process
        self._supervisor = SupervisorLink(CONNECTION, on_end=lambda: self._exit(RANK_LOST))
        self._supervisor.tell(restarts=settings.restarts)
        self._group = _join()  # blocks all threads of this process; the supervisor waits for the first heartbeat
        self.rank, self.size = self._group.rank(), self._group.size()
        self._stream = mx.gpu if "NCCL_HOST_IP" in os.environ else mx.cpu
        self._watch = Watch(hang_seconds=settings.hang_seconds, alive=self._supervisor.alive, lost=self.lose)
        self._watch.start()
        self._tell_settings()
        with self._watch.deadline(CONNECT_SECONDS, "did not connect"):
            self._links = {link.rank: link for link in self._connect()}
        for link in self._links.values():
            self._watch.add(link)

    def apply(self, settings: DistributedSection) -> None:
        """Use the settings of rank 0."""
        self.settings, self._watch.hang_seconds = settings, settings.hang_seconds
        self._tell_settings()

    def _tell_settings(self) -> None:
        self._supervisor.tell(restarts=self.settings.restarts, hang_seconds=self.settings.hang_seconds)

    def send(self, rank: int, message: bytes) -> None:
        """Send a message; returns at once."""
        self._links[rank].send(message)

    def resumable(self, run_directory: str) -> None:
        """Tell the supervisor that the run can be resumed from now on."""
        self._supervisor.tell(run_directory=run_directory)

    def add(self, arrays: Mapping[str, mx.array]) -> dict[str, NDArray[np.float32]]:
        """Return the sums of float32 arrays over all ranks; every rank calls this with the same names and shapes.

        The arrays are added in pieces, each of which has a deadline. Ends the process if a rank is lost.
        """
        names = sorted(arrays)
        flat = np.concatenate([np.array(arrays[name], dtype=np.float32, copy=None).reshape(-1) for name in names])
        seconds = self.settings.collective_seconds
        for start in range(0, flat.size, PIECE):
            with self._watch.deadline(seconds, f"did not add its gradient within {seconds:g} s"):
                flat[start : start + PIECE] = self._add_piece(flat[start : start + PIECE])
        parts = np.split(flat, np.cumsum([arrays[name].size for name in names])[:-1])
        return {name: part.reshape(arrays[name].shape) for name, part in zip(names, parts, strict=True)}

    def _add_piece(self, piece: NDArray[np.float32]) -> NDArray[np.float32]:
        try:
            total = mx.distributed.all_sum(mx.array(piece), group=self._group, stream=self._stream)
            mx.eval(total)
        except RuntimeError as error:
            time.sleep(1.0)  # the connection of the lost rank names it, if its process has ended
            self.lose(None, f"failed to add its gradient ({error})")
            raise
        return np.array(total)

    def lose(self, rank: int | None, reason: str) -> None:
        """End the process because a rank was lost; in any thread.

        rank: None if it is not known which one. reason: completes the sentence about the lost rank.
        """
        others = [other for other in range(self.size) if other != self.rank]
        known = others[0] if rank is None and len(others) == 1 else rank
        which = "another rank" if known is None else f"rank {known}"
        self.end(f"lost {which}, which {reason}", lost=known)

    def end(self, problem: str, *, lost: int | None = None) -> None:
        """End the process, which the supervisor starts again, and tell the other ranks; nothing after `close`.

        problem: completes a sentence about this rank. lost: the rank that was lost, if it is known.
        """
        if not self._ending.acquire(blocking=False):
            return
        if self.rank == 0:
            log.error("rank_lost", rank=lost, problem=problem)
        self._supervisor.tell(problem=problem)
        if self.rank == 0:
            for link in self._links.values():
                link.send(encode(Lost(problem=f"ended because rank 0 {problem}")))
            for link in self._links.values():
                link.close(seconds=0.2)
        self._exit(RANK_LOST)

    def expect_end(self) -> bool:
        """Ignore the end of other ranks from now on, because the run ends. False if the process is ending already."""
        if not self._ending.acquire(blocking=False):
            return False
        self._supervisor.tell(ended=True)
        return True

    def close(self) -> None:
        """Send the remaining messages and close the connections."""
        self.expect_end()
        for link in self._links.values():
            link.close()

    def _connect(self) -> Sequence[Link]:
        """Connect rank 0 with every other rank. Rank 0 tells its port and a token in a collective."""
        host = coordinator(os.environ)
        if self.rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, 0), family=family, backlog=self.size) as listener:
                token = secrets.token_bytes(16)
                self._share([listener.getsockname()[1], *token])
                return [self._link(other, connection) for other, connection in accept(listener, token, self.size)]
        port, *token_bytes = self._share([0] * 17)
        connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        connection.sendall(TOKEN.pack(bytes(token_bytes), self.rank))
        return [self._link(0, connection)]

    def _share(self, numbers: list[int]) -> list[int]:
        """Return the numbers of rank 0 at every rank. Others give zeros."""
        total = mx.distributed.all_sum(mx.array(numbers, dtype=mx.int32), group=self._group, stream=self._stream)
        mx.eval(total)
        return [int(number) for number in np.array(total)]

    def _link(self, rank: int, connection: socket.socket) -> Link:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Link(rank, connection, receive=self._receive, lost=self.lose)


def _join() -> mx.distributed.Group:
    """Join the group. A backend that gives up because another rank is not there yet is tried again."""
    while True:
        try:
            return mx.distributed.init(strict=True)
        except RuntimeError as error:
            if "connect" not in str(error).lower():
                raise ProfileError(f"mx.distributed cannot join the ranks: {error}") from error


def accept(listener: socket.socket, token: bytes, size: int) -> Sequence[tuple[int, socket.socket]]:
    """Return a connection to each other rank. Connections without the token are closed."""
    found: dict[int, socket.socket] = {}
    while len(found) < size - 1:
        connection, _ = listener.accept()
        connection.settimeout(5.0)
        sent = b""
        with suppress(OSError):
            while len(sent) < TOKEN.size and (more := connection.recv(TOKEN.size - len(sent))):
                sent += more
        known, rank = TOKEN.unpack(sent) if len(sent) == TOKEN.size else (b"", 0)
        if secrets.compare_digest(known, token) and 0 < rank < size and rank not in found:
            found[rank] = connection
        else:
            connection.close()
    return sorted(found.items())
