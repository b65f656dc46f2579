"""The channel between a run and a process with code of the user."""

from __future__ import annotations

import asyncio
import os
import socket
from threading import Timer

from msgspec import Struct

from training_run.supervision.guarded_process import WorkerChannel, frame


class Numbered(Struct):
    """A request."""

    number: int


async def test_the_event_loop_runs_between_two_requests() -> None:
    """Each request is sent by a callback of the loop after the one before; without the loop, none would follow."""
    parent, worker = socket.socketpair()
    channel, found = WorkerChannel(worker.detach()), list[int]()
    rescue = Timer(30.0, parent.shutdown, [socket.SHUT_WR])  # the worker would wait for ever
    rescue.start()
    with parent:
        parent.sendall(frame(Numbered(number=0)))
        async for request in channel.arriving(Numbered):
            found.append(request.number)
            if request.number == 2:
                parent.shutdown(socket.SHUT_WR)
            else:
                asyncio.get_running_loop().call_soon(parent.sendall, frame(Numbered(number=request.number + 1)))
        rescue.cancel()
    os.close(channel.descriptor)
    assert found == [0, 1, 2]
