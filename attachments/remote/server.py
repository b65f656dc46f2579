"""The HTTP client of one remote inference server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import httpx
import msgspec
from msgspec import Struct

from attachments.remote.messages import (
    FINGERPRINT_HEADER,
    RUN_HEADER,
    STEP_HEADER,
    VERSION_HEADER,
    RolloutAnswer,
    RolloutCall,
    ServedPolicy,
)
from attachments.remote.weights import Delivery, OverHttp, Weights
from clotho.settings.server import is_loopback
from protocols.errors import ProfileError, RequestError, visible
from protocols.sampling import SampleRequest
from training_run.local_network import local_network_hint

T = TypeVar("T", bound=Struct)

STATE_SECONDS, CONNECT_SECONDS = 5.0, 2.0
"""Time in which a server must report its state, and accept a connection. A server that does not has failed."""

BYTES_PER_TOKEN, FREE_BYTES = 4096, 1_048_576
"""Limit on the size of a response: for each token that may be sampled, and in addition."""


class Traffic:
    """Bytes of the bodies that a server was sent and has answered."""

    def __init__(self) -> None:
        self.sent = self.received = 0


class RemoteFailure(Exception):
    """A server does not respond, responds with an error, or returns data that cannot be correct."""


def server_address(url: str) -> httpx.URL:
    """Parse the address of a server. Raises ProfileError if it is not a valid address."""
    try:
        address = httpx.URL(url)
        is_valid = address.scheme in ("http", "https") and address.host and 1 <= (address.port or 80) <= 65535
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ProfileError(f"generator.server_url: {visible(url, 200)} is not a valid address: {error}") from error
    if not is_valid:
        raise ProfileError(f"generator.server_url: {visible(url, 200)} is not an address such as http://HOST:PORT")
    return address


class RemoteServer:
    """One server that replaces its weights on request. Every method but `close` raises RemoteFailure if it fails.

    name: the address without credentials, for logs.
    """

    restarts = False

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        run_id: str = "",
        timeout_seconds: float = 600.0,
        delivery: Delivery | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """run_id: names this run to the server. timeout_seconds: time for one group.

        delivery: how weights reach the server; None means over HTTP. transport: for tests.
        Raises ProfileError if `url` is not a valid address.
        """
        address = server_address(url)
        self.name = str(address.copy_with(username=None, password=None, query=None)).rstrip("/")
        self.traffic = Traffic()
        self._timeout_seconds = timeout_seconds
        self._delivery = delivery or OverHttp()
        headers = {RUN_HEADER: run_id} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = httpx.AsyncClient(
            base_url=address,
            transport=transport,
            headers=headers,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
            follow_redirects=False,
            trust_env=not is_loopback(address.host),
        )

    async def served(self) -> ServedPolicy:
        """Return the policy that the server samples from."""
        return await self._call("GET", "/v1/policy", ServedPolicy, seconds=STATE_SECONDS)

    async def push(self, weights: Weights) -> ServedPolicy:
        """Have the server replace its weights, and return the policy that it samples from now."""
        ready = weights.ready
        body, headers = await self._delivery.body(weights)
        headers |= {
            VERSION_HEADER: str(ready.version),
            STEP_HEADER: str(ready.step),
            FINGERPRINT_HEADER: ready.fingerprint,
        }
        seconds = self._timeout_seconds
        try:
            served = await self._call(
                "PUT", "/v1/policy/weights", ServedPolicy, body=body, headers=headers, seconds=seconds
            )
        except RequestError as error:
            raise RemoteFailure(f"refuses the weights: {error}") from error
        if (served.version, served.fingerprint) != (ready.version, ready.fingerprint):
            raise RemoteFailure(f"serves version {served.version} after version {ready.version} was sent")
        return served

    async def sample(self, request: SampleRequest) -> RolloutAnswer:
        """Return one completion per seed. Raises RequestError if the server refuses the request."""
        return await self._call(
            "POST",
            "/v1/rollouts",
            RolloutAnswer,
            body=msgspec.json.encode(RolloutCall.of(request)),
            headers={"content-type": "application/json"},
            seconds=self._timeout_seconds,
            max_bytes=FREE_BYTES + BYTES_PER_TOKEN * len(request.seeds) * request.sampling.max_tokens,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        seconds: float,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        max_bytes: int = FREE_BYTES,
    ) -> T:
        """Send a request; return its decoded response. The time limit is that of the whole call.

        A limit of each read alone would let a server send parts of a response, or interim responses, without end.
        """
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream(method, path, content=body, headers=dict(headers or {}), timeout=timeout) as response,
            ):
                self.traffic.sent += len(body)
                content = await _read(response, max_bytes)
                self.traffic.received += len(content)
                status = response.status_code
        except TimeoutError:
            raise RemoteFailure(f"{method} {path}: no complete response within {seconds:g} seconds") from None
        except httpx.HTTPError as error:
            hint = local_network_hint(error, self._http.base_url.host)
            raise RemoteFailure(f"{method} {path}: {type(error).__name__}: {visible(str(error), 200)}{hint}") from error
        if status != 200:
            raise _refusal(f"{method} {path}", status, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RemoteFailure(f"{method} {path}: not a valid response: {visible(str(error), 200)}") from error


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > max_bytes:
            raise RemoteFailure(f"a response is larger than {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


class _Detail(Struct, frozen=True, kw_only=True):
    message: str = ""
    param: str | None = None


class _Refusal(Struct, frozen=True, kw_only=True):
    error: _Detail = _Detail()


def _refusal(call: str, status: int, content: bytes) -> RemoteFailure | RequestError:
    try:
        detail = msgspec.json.decode(content, type=_Refusal).error
    except (msgspec.MsgspecError, ValueError):
        detail = _Detail()
    if status == 400 and detail.param is not None:
        return RequestError(visible(detail.message, 500), param=visible(detail.param, 100))
    return RemoteFailure(f"{call}: status {status} {visible(detail.message, 300)}".rstrip())
