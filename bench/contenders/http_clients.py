"""Clients of an OpenAI-compatible server in one process: throughput and time to first token.

They use HTTP/1.0 with one connection per request, which every server supports, and only the standard library, because
they share the processor with the server.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

HOST = "127.0.0.1"
ROUTE = "/v1/chat/completions"
PATIENCE = 120.0
"""Time limit of one response, in seconds."""

Body = dict[str, Any]


class Load(NamedTuple):
    """The requests to send.

    clients: number of concurrent clients, each with `answers` requests in sequence. tokens: of every response.
    model: name of the model in requests; empty: requests name none.
    """

    clients: int
    tokens: int
    answers: int
    model: str = ""


class Rate(NamedTuple):
    """Completion tokens of all responses per second of total time, and the mean length of a response."""

    tokens_per_second: float
    answer_tokens: float


def throughput(port: int, load: Load) -> Rate:
    """Request complete responses. Raises OSError, ValueError or TimeoutError if the server does not deliver them."""
    began = time.perf_counter()
    lengths = asyncio.run(_all_clients(port, load, answered_tokens))
    return Rate(sum(lengths) / (time.perf_counter() - began), statistics.fmean(lengths))


def first_token_seconds(port: int, load: Load) -> float:
    """Median time from opening a connection to the first text of a streamed response. Raises as `throughput` does.

    Responses without text, which random weights can produce, do not count. Raises ValueError if all are empty.
    """
    found = [seconds for seconds in asyncio.run(_all_clients(port, load, first_text)) if not math.isnan(seconds)]
    if not found:
        raise ValueError("no response has text")
    return statistics.median(found)


async def _all_clients(port: int, load: Load, ask: Callable[[int, Body], Awaitable[float]]) -> list[float]:
    async def one_after_the_other(client: int) -> list[float]:
        return [await ask(port, _body(client, turn, load)) for turn in range(load.answers)]

    each = await asyncio.gather(*(one_after_the_other(client) for client in range(load.clients)))
    return [value for values in each for value in values]


def _body(client: int, turn: int, load: Load) -> Body:
    """A question that no other client sends, so that no prompt is completely in a cache."""
    question = f"What is {client + 10} + {turn + 10}?"
    named = {"model": load.model} if load.model else {}
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": load.tokens, "temperature": 1.0, **named}


async def answered_tokens(port: int, body: Body, client: str = "") -> float:
    """Number of tokens of a complete response."""
    answer = b"".join([line async for line in lines(port, body, client)])
    return float(json.loads(answer)["usage"]["completion_tokens"])


async def first_text(port: int, body: Body, client: str = "") -> float:
    """Seconds until the first text, NaN without text; the rest of the stream is read as well."""
    began, first = time.perf_counter(), math.nan
    async for line in lines(port, {**body, "stream": True}, client):
        if math.isnan(first) and line.startswith(b"data: {"):
            delta = json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"]
            text = delta.get("content") or delta.get("reasoning_content")
            first = time.perf_counter() - began if text else math.nan
    return first


async def lines(port: int, body: Body, client: str = "") -> AsyncIterator[bytes]:
    """Lines of the response body as they arrive.

    client: name by which the server tells clients of one address apart. Raises ValueError for another status than 200.
    """
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(_request(json.dumps(body).encode(), client))
            head = await reader.readuntil(b"\r\n\r\n")
            if head.split(b" ", 2)[1] != b"200":
                raise ValueError(f"{head.splitlines()[0].decode()}: {(await reader.read()).decode()}")
            async for line in reader:
                yield line
        finally:
            writer.close()


def _request(body: bytes, client: str) -> bytes:
    head = [
        f"POST {ROUTE} HTTP/1.0",
        f"Host: {HOST}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *([f"Authorization: Bearer -:{client}"] if client else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
