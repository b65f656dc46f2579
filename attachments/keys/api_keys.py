"""The file of API keys: one table per key, with its secret or the environment variable of the secret, and quotas."""

from __future__ import annotations

import math
import os
import re
import stat
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from clotho.serving.auth import ClientKey, Reservation, key_digest
from clotho.serving.errors import ApiError
from protocols.errors import ProfileError, visible

NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
SECRET = re.compile(r"[!-~]{8,512}")
MAX_BYTES = 1_048_576
Limit = Annotated[int, Meta(ge=1)]


class KeyLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one key; None: no limit.

    max_requests: requests that have not ended. max_queued_tokens: tokens that the requests which have not ended can use
    at most, prompts included. tokens_per_minute: tokens of prompts and completions.
    """

    max_requests: Limit | None = None
    max_queued_tokens: Limit | None = None
    tokens_per_minute: Limit | None = None


class _Table(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file: `key` or `key_env`, `admin`, and limits."""

    key: str | None = None
    key_env: str | None = None
    admin: bool = False


class ApiKey(Struct, frozen=True, kw_only=True):
    """One key. digest, admin: see `ClientKey`."""

    name: str
    digest: bytes
    admin: bool = False
    limits: KeyLimits = KeyLimits()


def read_api_keys(path: str, environment: Mapping[str, str] = os.environ) -> tuple[ApiKey, ...]:
    """Read the keys of a file; none if `path` is empty.

    A file that contains keys must belong to the user of this process, or root, and nobody else may read it. Raises
    ProfileError, which names the table and never contains a key.
    """
    if not path:
        return ()
    tables, mode = _read(Path(path))
    keys: dict[bytes, ApiKey] = {}
    for name, table in tables.items():
        where = f"{path}: [{visible(name, 40)}]"
        if not NAME.fullmatch(name):
            raise ProfileError(f"{where}: a name has 1 to 32 letters, digits, _ and -")
        if (table.key is None) == (table.key_env is None):
            raise ProfileError(f"{where}: set either key or key_env")
        if table.key is not None and mode & 0o077:
            raise ProfileError(f"{path}: other users can read the keys; run chmod 600 {path}, or use key_env")
        source = "key" if table.key_env is None else f"the environment variable {visible(table.key_env, 60)}"
        secret = table.key if table.key_env is None else environment.get(table.key_env, "")
        if secret is None or not SECRET.fullmatch(secret):
            raise ProfileError(f"{where}: {source} must have 8 to 512 printable ASCII characters without spaces")
        digest = key_digest(secret.encode())
        if digest in keys:
            raise ProfileError(f"{where}: has the same key as [{keys[digest].name}]")
        limits = {field: getattr(table, field) for field in KeyLimits.__struct_fields__}
        keys[digest] = ApiKey(name=name, digest=digest, admin=table.admin, limits=KeyLimits(**limits))
    if not keys:
        raise ProfileError(f"{path}: contains no key; each table [NAME] is one key")
    return tuple(keys.values())


def _read(path: Path) -> tuple[dict[str, _Table], int]:
    """Return the tables of the file, and its permissions. Raises ProfileError."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ProfileError(f"{path}: is not a file")
            if status.st_uid not in (0, os.geteuid()):
                raise ProfileError(f"{path}: belongs to another user")
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ProfileError(f"{path}: is larger than {MAX_BYTES} bytes")
        return msgspec.convert(tomllib.loads(text.decode()), dict[str, _Table]), stat.S_IMODE(status.st_mode)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: is not valid TOML ({type(error).__name__})") from None
    except msgspec.ValidationError as error:
        raise ProfileError(f"{path}: {error}") from error
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from error


RETRY_SECONDS = 1
"""`Retry-After` of a refusal whose end depends on other requests."""


def limited(key: ApiKey) -> ClientKey:
    """Return a key with a quota that nothing has used."""
    return ClientKey(name=key.name, digest=key.digest, admin=key.admin, quota=Quota(key.limits))


class Quota:
    """What the requests of one key use, within its limits. All methods belong to the event loop.

    Tokens per minute are a token bucket: it holds at most the tokens of one minute and fills up evenly. A request takes
    the most tokens that it can use (prompt and maximum completions) when it is validated, and returns the unused ones
    when it has finished. A request that is aborted or fails returns none.

    refused: number of refused requests by limit.
    """

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused: Counter[str] = Counter()
        self._limits, self._clock = limits, clock
        self._requests = self._queued = 0
        self._allowance, self._updated = float(limits.tokens_per_minute or 0), clock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request from its arrival to its end. Raises ApiError with status 429."""
        limit = self._limits.max_requests
        if limit is not None and self._requests >= limit:
            raise self._refusal("max_requests", f"{self._requests} requests are in progress, of at most {limit}")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[Reservation]:
        """Count tokens of a request until its end. Raises ApiError with status 429, or 400 if they never fit."""
        self._take(tokens)
        reservation = Reservation()
        self._queued += tokens
        try:
            yield reservation
        finally:
            self._queued -= tokens
            self._allowance += reservation.unused

    def _take(self, tokens: int) -> None:
        for name in ("max_queued_tokens", "tokens_per_minute"):
            limit = getattr(self._limits, name)
            if limit is not None and tokens > limit:
                message = f"The prompt and max_tokens are {tokens} tokens; this key is limited to {limit} ({name})."
                raise ApiError(400, message, code="request_too_large")
        limit = self._limits.max_queued_tokens
        if limit is not None and self._queued + tokens > limit:
            detail = f"{self._queued} tokens are queued and {tokens} requested, of at most {limit}"
            raise self._refusal("max_queued_tokens", detail)
        per_minute = self._limits.tokens_per_minute
        if per_minute is None:
            return
        now = self._clock()
        self._allowance = min(per_minute, self._allowance + (now - self._updated) * per_minute / 60)
        self._updated = now
        if (missing := tokens - self._allowance) > 0:
            detail = f"{tokens} tokens are requested, and {int(self._allowance)} of {per_minute} per minute are left"
            raise self._refusal("tokens_per_minute", detail, math.ceil(missing * 60 / per_minute))
        self._allowance -= tokens

    def _refusal(self, limit: str, detail: str, seconds: int = RETRY_SECONDS) -> ApiError:
        self.refused[limit] += 1
        return ApiError(
            429,
            f"Rate limit of this key reached ({limit}): {detail}. Try again in {seconds} s.",
            code="rate_limit_exceeded",
            error_type="requests" if limit == "max_requests" else "tokens",
            headers={"retry-after": str(seconds)},
        )
