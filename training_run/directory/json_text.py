"""A record as one line of JSON, whatever its values are."""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.errors import escape_invisible


def encode(record: Any, *, terminal_safe: bool = False) -> bytes:
    """Encode a record as JSON on one line.

    NaN and infinities become null, lone surrogates become U+FFFD, and objects of unknown types become their `str`.
    terminal_safe: the characters that `protocols.errors.visible` escapes become JSON escapes.
    """
    try:
        line = msgspec.json.encode(record, enc_hook=str)
    except UnicodeEncodeError:
        line = msgspec.json.encode(_without_surrogates(msgspec.to_builtins(record, enc_hook=str)))
    return escape_invisible(line.decode(), _json_escape).encode() if terminal_safe else line


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_surrogates(item) for item in value]
        case _:
            return value
