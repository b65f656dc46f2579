"""Clients that leave while they wait: what was done for them is given up."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await the work; if the client leaves first, cancel it and raise ClientDisconnect."""
    gone = False
    failure: Exception | None = None
    results: list[T] = []

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            results.append(await work)
        except Exception as error:
            failure = error
        group.cancel_scope.cancel()
    if gone:
        raise ClientDisconnect
    if failure is not None:
        raise failure
    return results[0]
