"""The file of API keys: one table per key, with its secret or the environment variable of the secret, and limits."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from clotho.serving.auth import key_digest
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
