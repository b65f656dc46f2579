"""The HTTP face of an Atropos API server (atroposlib 0.4): one method for each question.

Bodies of HTTP answers, within a bound, however small they were packed.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import httpx
import msgspec
from anyio.to_thread import run_sync
from msgspec import Struct

from clotho.atropos.wire import Delivery, EnvironmentStatus, Info, Status
from clotho.config.addresses import is_loopback
from protocols.errors import ProfileError

GZIP = 31  # window bits: gzip's own framing


class BodyTooLarge(Exception):
    """More than was wanted of it."""


class BodyBroken(Exception):
    """It cannot be unpacked, or it broke off."""


async def read_bounded(response: httpx.Response, most: int) -> bytes:
    """Read the body of a streamed answer, plain or gzip, of at most so many bytes once unpacked.

    Raises BodyTooLarge as soon as there are more, BodyBroken, and what httpx raises.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise BodyBroken("it is packed in a way that was not asked for")
    unpacker = zlib.decompressobj(GZIP) if encoding == "gzip" else None
    parts, size = [], 0
    async for chunk in response.aiter_raw():
        part = _unpack(unpacker, chunk, most + 1 - size) if unpacker else chunk
        size += len(part)
        if size > most:
            raise BodyTooLarge
        parts.append(part)
    if unpacker and not unpacker.eof:
        raise BodyBroken("it broke off")
    return b"".join(parts)


def _unpack(unpacker: zlib._Decompress, chunk: bytes, most: int) -> bytes:
    try:
        return unpacker.decompress(chunk, most)
    except zlib.error as error:
        raise BodyBroken(f"it cannot be unpacked: {error}") from error


T = TypeVar("T")
LARGEST_BODY = 256 * 2**20
TIMEOUT = httpx.Timeout(connect=5.0, read=60.0, write=30.0, pool=5.0)
KEEP_ALIVE = 2.0  # less than the server's 5 s, so that a connection is never used while it is being closed
POISONED = " (so it does, once, where a number of a batch is not finite: that batch is lost)"


class ServerAway(Exception):
    """It does not answer, or cannot at the moment."""


class NotAtropos(Exception):
    """Something answers that is no Atropos API server."""


class Registration(Struct, frozen=True, kw_only=True):
    """Trainer -> API server. batch_size: in sequences; max_token_len: the server's bound of a sequence, exclusive.

    checkpoint_dir, save_checkpoint_interval: where and how often environments may keep their own state.
    num_steps: of the whole run.
    """

    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    num_steps: int


class ApiClient:
    """Asks; every method raises ServerAway, NotAtropos and nothing else.

    url: may have credentials, which are never shown. Raises ProfileError where it is none.
    """

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """transport: in place of the network."""
        base = require_address(url)
        self.shown = str(base.copy_with(username=None, password=None, query=None)).rstrip("/")
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
        """For whom a trainer has registered."""
        return await self._ask("GET", "/info", Info)

    async def register(self, registration: Registration, *, step: int) -> None:
        """Register a trainer that has made `step` updates; without effect where one is registered."""
        fields = msgspec.structs.asdict(registration)
        await self._content(
            "POST", "/register", fields | {"wandb_group": "", "wandb_project": "", "starting_step": step}
        )

    async def reset(self) -> None:
        """Make it forget trainer, environments and groups."""
        await self._content("GET", "/reset_data")

    async def batch(self) -> Delivery:
        """Take a batch: whoever takes it has it, and a lost answer is a lost batch. Raises BodyTooLarge too."""
        try:
            content = await self._body("GET", "/batch")
        except httpx.HTTPError as error:
            raise ServerAway(_said("GET", "/batch", error)) from error
        return await run_sync(_decoded, content, "GET /batch", Delivery)

    async def status(self) -> Status:
        """How much is queued."""
        return await self._ask("GET", "/status", Status)

    async def environment(self, env_id: int) -> EnvironmentStatus:
        """How much of that is an environment's; ServerAway where there is none of that number."""
        return await self._ask("GET", "/status-env", EnvironmentStatus, {"env_id": env_id})

    async def close(self) -> None:
        """Give up the connections."""
        await self._http.aclose()

    async def _ask(self, method: str, path: str, kind: type[T], fields: dict[str, Any] | None = None) -> T:
        return _decoded(await self._content(method, path, fields), f"{method} {path}", kind)

    async def _content(self, method: str, path: str, fields: dict[str, Any] | None = None) -> bytes:
        try:
            return await self._body(method, path, fields)
        except httpx.HTTPError as error:
            raise ServerAway(_said(method, path, error)) from error
        except BodyTooLarge as error:
            raise NotAtropos(f"{method} {path} answered more than {LARGEST_BODY} bytes") from error

    async def _body(self, method: str, path: str, fields: dict[str, Any] | None = None) -> bytes:
        async with self._http.stream(method, path, json=fields) as response:
            if response.status_code >= 500:
                hint = POISONED if (path, response.status_code) == ("/batch", 500) else ""
                raise ServerAway(f"{method} {path} answered {response.status_code}{hint}")
            if response.status_code != 200:
                raise NotAtropos(f"{method} {path} answered {response.status_code}")
            try:
                return await read_bounded(response, LARGEST_BODY)
            except BodyBroken as error:
                raise ServerAway(f"the answer to {method} {path} cannot be read: {error}") from error


def require_address(url: str) -> httpx.URL:
    """Read an address; raises ProfileError where it is none."""
    try:
        address = httpx.URL(url)
        known = address.host and 1 <= (address.port or 80) <= 65535
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ProfileError(f"atropos.url is no address: {error}") from error
    if not known:
        raise ProfileError(f"atropos.url is no address: host {address.host!r}, port {address.port}")
    return address


def _decoded(content: bytes, question: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise NotAtropos(f"the answer to {question} is not what an Atropos API server says") from error


def _said(method: str, path: str, error: httpx.HTTPError) -> str:
    return f"{method} {path}: {str(error) or type(error).__name__}"
