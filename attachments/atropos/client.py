"""HTTP client of an Atropos API server (atroposlib 0.4): one method per endpoint, and the response formats.

The size of a response body is limited after decompression.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, TypeVar

import httpx
import msgspec
from msgspec import Raw, Struct

from clotho.lanes.daemon_threads import DaemonThreads
from clotho.settings.server import is_loopback
from protocols.errors import ProfileError
from training_run.local_network import local_network_hint

GZIP = 31  # zlib window bits for the gzip format


class BodyTooLarge(Exception):
    """The body of a response exceeds the limit."""


class BodyBroken(Exception):
    """The body of a response is truncated or cannot be decompressed."""


async def read_bounded(response: httpx.Response, max_bytes: int) -> bytes:
    """Read the body of a streamed response, plain or gzip, of at most `max_bytes` after decompression.

    Raises BodyTooLarge as soon as the limit is exceeded, BodyBroken, and the exceptions of httpx.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise BodyBroken(f"the content encoding {encoding!r} was not requested")
    decompressor = zlib.decompressobj(GZIP) if encoding == "gzip" else None
    parts, size = [], 0
    async for chunk in response.aiter_raw():
        part = _decompress(decompressor, chunk, max_bytes + 1 - size) if decompressor else chunk
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge
        parts.append(part)
    if decompressor and not decompressor.eof:
        raise BodyBroken("the body is truncated")
    return b"".join(parts)


def _decompress(decompressor: zlib._Decompress, chunk: bytes, max_bytes: int) -> bytes:
    try:
        return decompressor.decompress(chunk, max_bytes)
    except zlib.error as error:
        raise BodyBroken(f"the body cannot be decompressed: {error}") from error


T = TypeVar("T")
MAX_BODY_BYTES = 256 * 2**20
TIMEOUT = httpx.Timeout(connect=5.0, read=60.0, write=30.0, pool=5.0)
KEEP_ALIVE = 2.0  # less than the server's 5 s, so that no request uses a connection that the server is closing
NOT_FINITE_HINT = " (the server responds so, once, if a batch contains a number that is not finite; that batch is lost)"


class ServerUnavailable(Exception):
    """The server does not respond, or responds with an error that may pass."""


class NotAtropos(Exception):
    """The response does not come from an Atropos API server."""


class Registration(Struct, frozen=True, kw_only=True):
    """Trainer -> API server. batch_size: in sequences. max_token_len: every sequence must have fewer tokens.

    checkpoint_dir, save_checkpoint_interval: where and how often environments may save their own state.
    num_steps: number of steps of the run. wandb_project, wandb_group: of the run, for environments that report there.
    """

    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    num_steps: int
    wandb_project: str = ""
    wandb_group: str = ""


class BatchResponse(Struct, frozen=True, kw_only=True):
    """The response of GET /batch. status: "error" if no trainer is registered; `message` then contains the reason."""

    batch: list[Raw] | None
    status: str | None = None
    message: str | None = None


class Info(Struct, frozen=True, kw_only=True):
    """The response of GET /info. batch_size: -1 while no trainer is registered."""

    batch_size: int
    max_token_len: int


class Status(Struct, frozen=True, kw_only=True):
    """The response of GET /status. queue_size: groups that are not part of a batch yet."""

    queue_size: int


class EnvironmentStatus(Struct, frozen=True, kw_only=True):
    """The response of GET /status-env. self_queue_size: queued groups of the environment.

    max_group_size: largest size of the queued groups. unallocated_fraction: 1 minus the shares that
    `min_batch_allocation` reserves.
    """

    self_queue_size: int
    max_group_size: int = 1
    unallocated_fraction: float = 1.0


class ApiClient:
    """Client of one API server. Every method raises only ServerUnavailable and NotAtropos.

    url: address of the server; credentials in it are never shown. Raises ProfileError if it is not a valid address.
    """

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """transport: replaces the network in tests."""
        base = require_address(url)
        self.shown = str(base.copy_with(username=None, password=None, query=None)).rstrip("/")
        self._threads = DaemonThreads("batch", 1, wait_seconds=math.inf, work_seconds=math.inf)
        self._http = httpx.AsyncClient(
            base_url=base,
            transport=transport,
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=4, keepalive_expiry=KEEP_ALIVE),
            headers={"accept-encoding": "gzip"},
            follow_redirects=False,
            trust_env=not is_loopback(base.host),
        )

    async def info(self) -> Info:
        """Return the batch size and maximum length of the registered trainer."""
        return await self._request("GET", "/info", Info)

    async def register(self, registration: Registration, *, step: int) -> None:
        """Register a trainer that has completed `step` steps. Has no effect if a trainer is already registered."""
        fields = msgspec.structs.asdict(registration)
        await self._content("POST", "/register", fields | {"starting_step": step})

    async def reset(self) -> None:
        """Clear the trainer, the environments and the groups of the server."""
        await self._content("GET", "/reset_data")

    async def batch(self) -> BatchResponse:
        """Take a batch from the server; a lost response is a lost batch. Also raises BodyTooLarge."""
        try:
            content = await self._body("GET", "/batch")
        except httpx.HTTPError as error:
            raise ServerUnavailable(_transport_error("GET", "/batch", error)) from error
        return await self._threads.run(lambda: _decoded(content, "GET /batch", BatchResponse))

    async def status(self) -> Status:
        """Return the state of the server's queue."""
        return await self._request("GET", "/status", Status)

    async def environment(self, env_id: int) -> EnvironmentStatus:
        """Return the state of one environment; raises ServerUnavailable if `env_id` is not registered."""
        return await self._request("GET", "/status-env", EnvironmentStatus, {"env_id": env_id})

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _request(self, method: str, path: str, kind: type[T], fields: dict[str, Any] | None = None) -> T:
        return _decoded(await self._content(method, path, fields), f"{method} {path}", kind)

    async def _content(self, method: str, path: str, fields: dict[str, Any] | None = None) -> bytes:
        try:
            return await self._body(method, path, fields)
        except httpx.HTTPError as error:
            raise ServerUnavailable(_transport_error(method, path, error)) from error
        except BodyTooLarge as error:
            raise NotAtropos(f"{method} {path} returned more than {MAX_BODY_BYTES} bytes") from error

    async def _body(self, method: str, path: str, fields: dict[str, Any] | None = None) -> bytes:
        async with self._http.stream(method, path, json=fields) as response:
            if response.status_code >= 500:
                hint = NOT_FINITE_HINT if (path, response.status_code) == ("/batch", 500) else ""
                raise ServerUnavailable(f"{method} {path} returned status {response.status_code}{hint}")
            if response.status_code != 200:
                raise NotAtropos(f"{method} {path} returned status {response.status_code}")
            try:
                return await read_bounded(response, MAX_BODY_BYTES)
            except BodyBroken as error:
                raise ServerUnavailable(f"the response of {method} {path} cannot be read: {error}") from error


def require_address(url: str) -> httpx.URL:
    """Parse `atropos.url`. Raises ProfileError if it is not a valid address."""
    try:
        address = httpx.URL(url)
        is_valid = address.host and 1 <= (address.port or 80) <= 65535
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ProfileError(f"atropos.url is not a valid address: {error}") from error
    if not is_valid:
        raise ProfileError(f"atropos.url is not a valid address: host {address.host!r}, port {address.port}")
    return address


def _decoded(content: bytes, request: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise NotAtropos(f"the response of {request} does not have the format of an Atropos API server") from error


def _transport_error(method: str, path: str, error: httpx.HTTPError) -> str:
    hint = local_network_hint(error, error.request.url.host)
    return f"{method} {path}: {str(error) or type(error).__name__}{hint}"
