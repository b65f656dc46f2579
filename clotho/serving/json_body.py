"""Strict decoding of a JSON object, in time and memory linear in its size and with a bounded number of elements."""

from __future__ import annotations

import json
import math
import re
from itertools import islice
from typing import Any, NoReturn

import msgspec

from clotho.serving.errors import ApiError

MAX_ELEMENTS = 65_536
"""Maximum number of fields, objects and lists of a body together; list items that are numbers or strings do not count.
The largest valid request, 2,048 messages with a part each, has about 15,000."""

STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"(\s*+:)?)?+|([\[{])', re.DOTALL)
"""A string, with a group if it is the name of a field, or the beginning of an object or a list. Never backtracks."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def json_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises ApiError with status 400 for other values, invalid JSON, text that is not UTF-8, numbers that are not finite,
    duplicate fields, and bodies with too many elements or too much nesting.
    """
    _require_bounded(body)
    try:
        value = DECODER.decode(body.decode())
        if SURROGATE.search(body):
            msgspec.json.decode(body)  # refuses unpaired surrogates, which are no text
    except RecursionError as error:
        raise ApiError(400, "The request body is nested too deeply.") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    return value


def _require_bounded(body: bytes) -> None:
    if body.count(b":") + body.count(b"[") + body.count(b"{") <= MAX_ELEMENTS:
        return  # an upper bound, which includes the characters of strings
    elements = (True for match in STRUCTURE.finditer(body) if match.lastindex)
    if next(islice(elements, MAX_ELEMENTS, None), False):
        raise ApiError(400, f"The request body has more than {MAX_ELEMENTS} fields, objects and lists.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ApiError(400, f"The request body contains the field {duplicate[:64]!r} twice.", param=duplicate)
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is out of range")
    return number


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_not_a_number)
