"""Clients of the soak run: sixteen that send requests in a loop, and hostile requests one at a time."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import anyio
import httpx

HOST = "127.0.0.1"
CLIENTS = 16
PATIENCE_SECONDS = 120.0
"""Time limit of one response; no response within it counts as unanswered."""

Body = dict[str, Any]
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"

BAD: tuple[tuple[str, bytes, int], ...] = (
    (COMPLETIONS, b'{"prompt": "a", "stop": 5}', 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
    (COMPLETIONS, b'{"prompt": []}', 400),
    (COMPLETIONS, b'{"prompt": "a", "n": 1000000}', 400),
    (COMPLETIONS, b'{"prompt": [-1]}', 400),
    (COMPLETIONS, b'{"prompt": "a", "logit_bias": {"99999999": 5}}', 400),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "model": "../../etc"}', 404),
    (GENERATE, b'{"input_ids": [[]]}', 400),
    (COMPLETIONS, b"\xff\xfe", 400),
    (COMPLETIONS, b'{"prompt": "a"', 400),
    ("/nowhere", b"{}", 404),
)
"""Requests that the server refuses: path, body and status."""


class Outcomes:
    """Counts of all requests by outcome; thread-safe.

    statuses: by kind of request and status. tokens: completion tokens that clients received. interrupted: the process
    was down or was killed during the request. hung_up: the client left. unanswered: failed although the process ran.
    unexpected: status or contents other than those of the table above.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.statuses: dict[str, Counter[str]] = {}
        self.interrupted = self.hung_up = self.tokens = 0
        self.unanswered: list[str] = []
        self.unexpected: list[str] = []

    def answered(self, kind: str, status: int, *, expected: tuple[int, ...], detail: str = "", tokens: int = 0) -> None:
        """Count one response. expected: statuses in order; 503 is always allowed."""
        with self._lock:
            self.statuses.setdefault(kind, Counter())[str(status)] += 1
            self.tokens += tokens
            if status not in (*expected, 503):
                self.unexpected.append(f"{kind}: status {status} {detail[:200]}")

    def failed(self, kind: str, error: str, *, interrupted: bool) -> None:
        """Count one request without a response."""
        with self._lock:
            if interrupted:
                self.interrupted += 1
            else:
                self.unanswered.append(f"{kind}: {error}")

    def left(self) -> None:
        """Count one request that its client abandoned."""
        with self._lock:
            self.hung_up += 1


class Target:
    """The server under load. life: number of starts so far. up: whether the process accepts requests."""

    def __init__(self, port: int) -> None:
        self.port, self.life, self.up, self.over = port, 0, False, False


def _question(draw: random.Random) -> Body:
    content = f"What is {draw.randrange(100)} + {draw.randrange(100)}?"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": draw.choice([4, 16, 48])}


def _prompt(draw: random.Random) -> Body:
    prompts = [f"{draw.randrange(100)}, {draw.randrange(100)}," for _ in range(draw.choice([1, 1, 2, 4]))]
    sampling: Body = draw.choice(
        [{}, {"temperature": 0}, {"top_p": 0.9, "seed": draw.randrange(2**31)}, {"logprobs": 2}]
    )
    return {"prompt": prompts, "n": draw.choice([1, 1, 2]), "max_tokens": draw.choice([4, 16]), **sampling}


def _tokens(draw: random.Random) -> Body:
    tokens = [draw.randrange(5, 60) for _ in range(draw.randrange(1, 40))]
    return {"prompt": {"prompt_token_ids": tokens}, "n": 4, "max_tokens": 16, "logprobs": 0}


KINDS: tuple[tuple[str, str, Callable[[random.Random], Body] | None, int], ...] = (
    ("chat", CHAT, _question, 4),
    ("chat, streamed", CHAT, _question, 4),
    ("completions", COMPLETIONS, _prompt, 4),
    ("completions, streamed", COMPLETIONS, _prompt, 3),
    ("generate", GENERATE, _tokens, 2),
    ("hang-up", CHAT, _question, 2),
    ("bad request", "", None, 4),
    ("health", "/health", None, 1),
    ("metrics", "/metrics", None, 1),
)
"""Kinds of requests: name, path, body, weight."""


class Client:
    """One client: a random request, a short pause, and again, until the soak is over."""

    def __init__(self, target: Target, outcomes: Outcomes, seed: int) -> None:
        self._target, self._outcomes, self._draw = target, outcomes, random.Random(seed)

    async def run(self) -> None:
        """Send requests until the target is over."""
        base = f"http://{HOST}:{self._target.port}"
        async with httpx.AsyncClient(base_url=base, timeout=PATIENCE_SECONDS, trust_env=False) as self._http:
            while not self._target.over:
                if self._target.up:
                    await self._once()
                await anyio.sleep(self._draw.uniform(0.05, 1.0))

    async def _once(self) -> None:
        kind, path, body, _ = self._draw.choices(KINDS, [weight for *_, weight in KINDS])[0]
        life = self._target.life
        try:
            if kind == "bad request":
                await self._bad()
            elif body is None:
                response = await self._http.get(path)
                self._outcomes.answered(kind, response.status_code, expected=(200,))
            elif "streamed" in kind or kind == "hang-up":
                await self._stream(kind, path, body(self._draw) | {"stream": True})
            else:
                response = await self._http.post(path, json=body(self._draw))
                tokens = response.json().get("usage", {}).get("completion_tokens", 0) if response.is_success else 0
                self._outcomes.answered(
                    kind, response.status_code, expected=(200,), detail=response.text, tokens=tokens
                )
        except (httpx.HTTPError, ValueError) as error:
            interrupted = self._target.life != life or not self._target.up
            self._outcomes.failed(kind, repr(error), interrupted=interrupted)

    async def _bad(self) -> None:
        path, content, status = self._draw.choice(BAD)
        response = await self._http.post(path, content=content, headers={"content-type": "application/json"})
        self._outcomes.answered("bad request", response.status_code, expected=(status,), detail=repr(content))

    async def _stream(self, kind: str, path: str, body: Body) -> None:
        events, last = 0, ""
        leave_after = self._draw.randrange(1, 4) if kind == "hang-up" else None
        async with self._http.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                events += bool(line)
                last = line or last
                if leave_after is not None and events >= leave_after:
                    return self._outcomes.left()
        if response.is_success and last != "data: [DONE]":
            raise ValueError(f"the stream ended with {last[:80]!r}")
        self._outcomes.answered(kind, response.status_code, expected=(200,), detail=last)
        return None


def run_clients(target: Target, outcomes: Outcomes, *, seed: int) -> threading.Thread:
    """Start all clients in one thread, which ends when the target is over."""

    async def together() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(CLIENTS):
                tasks.start_soon(Client(target, outcomes, seed * 1000 + number).run)

    thread = threading.Thread(target=anyio.run, args=(together,), name="clients")
    thread.start()
    return thread


def _duplicate_keys() -> tuple[str, bytes]:
    fields = "".join(f'"{number:x}":0,' for number in range(350_000))
    return COMPLETIONS, f'{{"prompt":"a",{fields}"5572f":1}}'.encode()


MANY_KEYS, LONG_PROMPT = "request with 350,000 keys", "request with a prompt of 4,000,000 digits"
BODIES: Mapping[str, Callable[[], tuple[str, bytes]]] = MappingProxyType(
    {
        MANY_KEYS: _duplicate_keys,
        LONG_PROMPT: lambda: (COMPLETIONS, b'{"prompt":"%s"}' % (b"7" * 4_000_000)),
        "request with 100,000 prompts": lambda: ("/v1/generate", json.dumps({"prompts": ["a"] * 100_000}).encode()),
        "request with 100,000 levels": lambda: (COMPLETIONS, b'{"prompt":' + b"[" * 100_000),
        "request with temperature 1e-38": lambda: (COMPLETIONS, b'{"prompt":"a","temperature":1e-38}'),
        "request of 8 MB": lambda: (COMPLETIONS, b'{"prompt":"%s"}' % (b"a" * 2**23)),
    }
)
"""Hostile requests with one body, all of which the server refuses."""
STALLED, UNREAD = "40 requests with stalled bodies", "8 streams that are never read"
HOSTILE = (*BODIES, STALLED, UNREAD)


def hostile(name: str, target: Target, outcomes: Outcomes) -> None:
    """Send one hostile request, or one set of them."""
    life = target.life
    try:
        if name == STALLED:
            _hold(target, 40, b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{" % COMPLETIONS.encode())
        elif name == UNREAD:
            body = json.dumps({"prompt": "1, 2,", "max_tokens": 64, "stream": True, "n": 8}).encode()
            head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
            _hold(target, 8, head % (COMPLETIONS.encode(), len(body)) + body)
        else:
            path, content = BODIES[name]()
            status = post(target.port, path, content)
            outcomes.answered(name, status, expected=(400, 413))
    except (OSError, http.client.HTTPException) as error:
        # A refusal that is sent before the whole body is read can close the connection while the client still writes.
        refused = isinstance(error, BrokenPipeError | ConnectionResetError)
        outcomes.failed(name, repr(error), interrupted=refused or target.life != life or not target.up)


def post(port: int, path: str, content: bytes) -> int:
    """Send a request and return the status of the response."""
    connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def _hold(target: Target, count: int, sent: bytes, *, seconds: float = 15.0) -> None:
    """Hold connections open without reading from them."""
    sockets = []
    try:
        for _ in range(count):
            with suppress(OSError):
                connection = socket.create_connection((HOST, target.port), timeout=10.0)
                sockets.append(connection)
                connection.sendall(sent)
        time.sleep(seconds)
    finally:
        for connection in sockets:
            connection.close()
