"""Tool calls in the text of a completion, whole or streamed."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, structs

from clotho.serving.tool_calls import CallDelta, ToolFormat, refuse_constant


def new_call_id(call_format: ToolFormat) -> str:
    """Return the id of a call. The chat templates of Mistral require nine letters and digits."""
    if call_format == "mistral":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class JsonEnd:
    """Finds the end of a JSON object or list in text that arrives in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Return the position behind the end of the value; None if `text` does not contain its end."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


BEGIN: dict[ToolFormat, str] = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
"""The mark before a call."""

HEADER = re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})\s*(?:\[CALL_ID\][\w-]{1,64})?\s*(?:\[ARGS\])?\s*(?=\{)")
"""Mistral's name before the arguments of a call."""

MAX_HEADER = 256


class ToolCallParser:
    """The tool calls in the text of one completion. The results do not depend on how the text is divided.

    A call is returned when its text is complete, and text that is no valid call stays content. If a grammar enforces
    the calls, their arguments are returned as they arrive.
    """

    def __init__(self, call_format: ToolFormat, *, enforced: bool, parallel: bool) -> None:
        self._format = call_format
        self._parallel = parallel
        self._calls = 0
        self._step = _Enforced(call_format) if enforced else _Free(call_format)

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._calls > 0

    def push(self, text: str, *, last: bool) -> tuple[str, tuple[CallDelta, ...]]:
        """Add text; return the content and the parts of calls that are final with it, in order among themselves."""
        content = ""
        calls: dict[int, CallDelta] = {}
        for part in self._step.push(text, last=last):
            if isinstance(part, str):
                content += part
                continue
            self._calls += part.name is not None
            index = self._calls - 1
            if index and not self._parallel:
                continue
            begun = calls.get(index)
            if begun is not None:
                calls[index] = structs.replace(begun, arguments=begun.arguments + part.arguments)
            else:
                call_id = new_call_id(self._format) if part.name is not None else None
                calls[index] = CallDelta(index=index, id=call_id, name=part.name, arguments=part.arguments)
        return content, tuple(calls.values())


class _CallPart(Struct, frozen=True):
    """The beginning of a call (with its name), or further text of its arguments."""

    name: str | None
    arguments: str


_Part = str | _CallPart


class _Free:
    """The parser of calls that no grammar enforces: a call is returned as a whole, or stays text."""

    def __init__(self, call_format: ToolFormat) -> None:
        self._format, self._begin = call_format, BEGIN[call_format]
        self._state: Literal["text", "call", "after"] = "text"
        self._buffer = self._mark = ""
        self._is_start = True  # whether everything so far is whitespace or calls
        self._scan()

    def _scan(self) -> None:
        """Search for the end of a value from the beginning of the buffer."""
        self._name: str | None = None
        self._value_at, self._scanned, self._end = -1, 0, JsonEnd()

    def push(self, text: str, *, last: bool) -> list[_Part]:
        """Add text; return the parts that are final with it."""
        self._buffer += text
        parts: list[_Part] = []
        steps = {"text": self._take_text, "call": self._take_call, "after": self._take_after}
        while steps[self._state](parts, last=last):
            pass
        return parts

    def _take_text(self, parts: list[_Part], *, last: bool) -> bool:
        if self._format == "llama3_json":
            return self._take_llama_text(parts, last=last)
        before, mark, rest = self._buffer.partition(self._begin)
        if mark:
            self._state, self._mark, self._buffer = "call", mark, rest
        else:
            held = 0 if last else held_back(before, (self._begin,))
            before, self._buffer = before[: len(before) - held], before[len(before) - held :]
        if before:
            parts.append(before)
        return bool(mark)

    def _take_llama_text(self, parts: list[_Part], *, last: bool) -> bool:
        """Take text of a format whose calls have no mark: they are the whole completion."""
        found = self._buffer.lstrip()
        if self._is_start and not last and self._begin.startswith(found):
            return False
        if self._is_start and found.startswith((self._begin, "{")):
            self._mark = self._begin if found.startswith(self._begin) else ""
            self._state, self._buffer = "call", found.removeprefix(self._mark)
            return True
        self._is_start = False
        if self._buffer:
            parts.append(self._buffer)
        self._buffer = ""
        return False

    def _take_call(self, parts: list[_Part], *, last: bool) -> bool:
        if self._value_at < 0 and not self._find_value():
            is_open = "{" not in self._buffer and len(self._buffer) < MAX_HEADER and not last
            return False if is_open else self._stays_text(parts)
        end = self._end.find(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return self._stays_text(parts) if last else False
        end += self._scanned
        calls = _calls(self._buffer[self._value_at : end], self._name)
        if not calls:
            return self._stays_text(parts)
        parts += calls
        self._state, self._buffer = "after", self._buffer[end:]
        self._scan()
        return True

    def _find_value(self) -> bool:
        """Find the beginning of the JSON value, and before it the name in one of Mistral's formats."""
        text = self._buffer.lstrip()
        opening = ("{", "[") if self._format == "mistral" else ("{",)
        if text.startswith(opening):
            self._value_at = self._scanned = len(self._buffer) - len(text)
        elif self._format == "mistral" and (header := HEADER.match(self._buffer)):
            self._name, self._value_at, self._scanned = header[1], header.end(), header.end()
        return self._value_at >= 0

    def _stays_text(self, parts: list[_Part]) -> bool:
        if self._mark:
            parts.append(self._mark)
        self._state, self._is_start = "text", False
        self._scan()
        return True

    def _take_after(self, parts: list[_Part], *, last: bool) -> bool:
        """Skip what separates a call from the next one."""
        del parts
        self._buffer = self._buffer.lstrip()
        separator = {"hermes": "</tool_call>", "llama3_json": ";", "mistral": ""}[self._format]
        if separator and self._buffer.startswith(separator):
            self._buffer = self._buffer.removeprefix(separator)
            return True
        if not self._buffer or (separator.startswith(self._buffer) and not last):
            return False
        self._state = "text"
        return True


def _calls(text: str, name: str | None) -> list[_CallPart]:
    """Return the calls of a JSON value; none if it is no call or list of calls. name: of the function of `text`."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return []
    if name is not None:
        return [_CallPart(name, text)] if isinstance(value, dict) else []
    calls = []
    for call in value if isinstance(value, list) else [value]:
        found = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if not isinstance(found, str) or not isinstance(arguments, dict):
            return []
        calls.append(_CallPart(found, json.dumps(arguments, ensure_ascii=False)))
    return calls


class _Enforced:
    """The parser of calls that a grammar enforces: arguments are returned as they arrive."""

    def __init__(self, call_format: ToolFormat) -> None:
        self._header = re.compile(ENFORCED_HEADER[call_format])
        self._buffer = ""
        self._end: JsonEnd | None = None
        self._has_calls = False

    def push(self, text: str, *, last: bool) -> list[_Part]:
        """Add text; return the parts that are final with it."""
        self._buffer += text
        parts: list[_Part] = []
        while self._buffer:
            if self._end is None:
                header = self._header.search(self._buffer)
                if header is None:
                    break
                parts.append(_CallPart(next(name for name in header.groups() if name), ""))
                self._buffer, self._end, self._has_calls = self._buffer[header.end() :], JsonEnd(), True
                continue
            end = self._end.find(self._buffer)
            parts.append(_CallPart(None, self._buffer[:end]))
            self._buffer = "" if end is None else self._buffer[end:]
            self._end = self._end if end is None else None
        if last and not self._has_calls and self._buffer:
            parts.append(self._buffer)
        return parts


NAME = r"([a-zA-Z0-9_.-]{1,64})"
OBJECT_HEADER = rf'\{{"name": "{NAME}", "(?:arguments|parameters)": (?=\{{)'
ENFORCED_HEADER: dict[ToolFormat, str] = {
    "hermes": OBJECT_HEADER,
    "llama3_json": OBJECT_HEADER,
    "mistral": rf"{OBJECT_HEADER}|\[TOOL_CALLS\]{NAME}\[ARGS\](?=\{{)",
}
"""What comes before the arguments of a call that `call_grammar` enforces."""


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
