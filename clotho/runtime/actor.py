"""An actor: one loop and one verb. End of input is end of life."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from protocols.queues import Inbox, Outbox

In = TypeVar("In")
Out = TypeVar("Out")


class Runnable(Protocol):
    """Anything the supervisor can run.

    If `run` takes a keyword `task_status` (anyio.abc.TaskStatus), the children after it are started only when it has
    called `task_status.started()`: the port is bound, the model is loaded.
    """

    @property
    def name(self) -> str:
        """What it is called in errors, logs and on /health; unique within a run."""

    async def run(self) -> None:
        """Work until the inputs end, then return; raise to fail."""


class Actor(ABC, Generic[In, Out]):
    """One box of the pipeline: receive, work, send, one message at a time. A convenience: the shape is Runnable."""

    def __init__(self, name: str, inbox: Inbox[In], outbox: Outbox[Out]) -> None:
        """Take ownership of both ends: `run` closes them, however it ends."""
        self.name = name
        self.inbox = inbox
        self.outbox = outbox

    async def run(self) -> None:
        """Handle every message; closing our outbox at the end tells the next box, and so on down the flow."""
        async with self.inbox, self.outbox:
            async for message in self.inbox:
                await self.outbox.send(await self.handle(message))

    @abstractmethod
    async def handle(self, message: In) -> Out:
        """Turn one message into the next. An exception ends this actor, and is its supervisor's to judge."""
