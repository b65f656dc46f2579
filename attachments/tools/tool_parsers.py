"""Tool calls in the text of a completion, whole or streamed.

`mlx_lm.tool_parsers` reads four of the five formats, but none as exactly, and each needs a whole text whose end is
known. Its parsers are therefore not used:

    hermes       a name need not be text, and NaN is accepted, which no JSON of a client can contain
    qwen3_coder  the text "null" becomes null and the flag "yes" false; a parameter with anyOf stays text; a number that
                 is none loses the call; text between parameters is dropped
    pythonic     names with hyphens are not read; a call with positional arguments or expressions is guessed; values may
                 have types that JSON lacks
    mistral      a call with [CALL_ID] has this id as its name, and one without [ARGS] is not read
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, structs

from attachments.tools.tool_calls import ToolFormat, refuse_constant
from attachments.tools.tool_forms import END_FUNCTION, FUNCTION, PARAMETER, Schemas, python_calls, xml_call, xml_value
from clotho.serving.chat_extension import CallDelta


def new_call_id(call_format: ToolFormat) -> str:
    """Return the id of a call. The chat templates of Mistral require nine letters and digits."""
    if call_format == "mistral":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class ValueEnd:
    """Finds the end of a value in text that arrives in parts; `find` gets each part once."""

    def __init__(self, *, quotes: str = '"', brackets: str = "{[ }]", followed_by: str = "") -> None:
        """brackets: those that open, and those that close. The defaults are those of JSON.

        followed_by: characters that end the value if they are outside of its brackets; empty: its last bracket does.
        """
        self._quotes, self._followed_by = quotes, followed_by
        self._opening, self._closing = brackets.split()
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Return the position behind the value; None if `text` does not contain its end."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif not self._depth and character in self._followed_by:
                return at
            elif character in self._quotes:
                self._quote = character
            elif character in self._opening:
                self._depth += 1
            elif character in self._closing:
                self._depth -= 1
                if self._depth <= 0 and not self._followed_by:
                    return at + 1
        return None


class MarkEnd:
    """Finds the end of a mark in text that arrives in parts; `find` gets each part once."""

    def __init__(self, mark: str) -> None:
        self._mark, self._kept = mark, ""

    def find(self, text: str) -> int | None:
        """Return the position behind the mark; None if the text so far does not contain it."""
        joined = self._kept + text
        at = joined.find(self._mark)
        before, self._kept = len(self._kept), joined[-(len(self._mark) - 1) :]
        return None if at < 0 else at + len(self._mark) - before


BEGIN: dict[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "pythonic": "<|python_start|>",
    "mistral": "[TOOL_CALLS]",
}
"""The mark before a call."""

END: dict[ToolFormat, str] = {
    "hermes": "</tool_call>", "qwen3_coder": "</tool_call>", "llama3_json": ";", "pythonic": "<|python_end|>",
    "mistral": "",
}  # fmt: skip
"""What follows a call."""

OPENING: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("{",), "qwen3_coder": ("<function=",), "llama3_json": ("{",), "pythonic": ("[",), "mistral": ("{", "["),
}  # fmt: skip
"""Beginnings of the value that contains a call or several."""

UNMARKED: frozenset[ToolFormat] = frozenset({"llama3_json", "pythonic"})
"""Formats whose calls need no mark: they are the whole completion."""

HEADER = re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})\s*(?:\[CALL_ID\][\w-]{1,64})?\s*(?:\[ARGS\])?\s*(?=\{)")
"""Mistral's name before the arguments of a call."""

MAX_HEADER = 256


class ToolCallParser:
    """The tool calls in the text of one completion. The results do not depend on how the text is divided.

    A call is returned when its text is complete, and text that is no valid call stays content. If a grammar enforces
    the calls, their arguments are returned as they arrive. A call that the end of the completion cuts is left out,
    unless a part of it has been returned before.
    """

    def __init__(
        self,
        call_format: ToolFormat,
        *,
        enforced: bool,
        parallel: bool,
        parameters: Mapping[str, Schemas] | None = None,
    ) -> None:
        """enforced: the text is calls and nothing else. parallel: return all calls, not only the first.

        parameters: JSON schemas of the parameters of each function, for formats whose values are not JSON.
        """
        self._format = call_format
        self._parallel = parallel
        self._calls = 0
        self._step: _Free | _Enforced
        if not enforced:
            self._step = _Free(call_format, parameters or {})
        elif call_format == "qwen3_coder":
            self._step = _EnforcedXml(parameters or {})
        else:
            self._step = _EnforcedPython() if call_format == "pythonic" else _EnforcedJson(call_format)

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
        cut = calls.get(self._calls - 1) if last and self._step.in_call else None
        return content, tuple(call for call in calls.values() if call is not cut or call.id is None)


class _CallPart(Struct, frozen=True):
    """The beginning of a call (with its name), or further text of its arguments."""

    name: str | None
    arguments: str


_Part = str | _CallPart


class _Free:
    """The parser of calls that no grammar enforces: a call is returned as a whole, or stays text."""

    in_call = False

    def __init__(self, call_format: ToolFormat, parameters: Mapping[str, Schemas]) -> None:
        self._format, self._begin, self._parameters = call_format, BEGIN[call_format], parameters
        self._state: Literal["text", "call", "after"] = "text"
        self._buffer = self._mark = ""
        self._is_start = True  # whether everything so far is whitespace or calls
        self._scan()

    def _scan(self) -> None:
        """Search for the end of a value from the beginning of the buffer."""
        self._name: str | None = None
        self._value_at = self._scanned = -1
        self._end: ValueEnd | MarkEnd = ValueEnd()
        if self._format == "qwen3_coder":
            self._end = MarkEnd(END_FUNCTION)
        elif self._format == "pythonic":
            self._end = ValueEnd(quotes="\"'", brackets="([{ )]}")

    def push(self, text: str, *, last: bool) -> list[_Part]:
        """Add text; return the parts that are final with it."""
        self._buffer += text
        parts: list[_Part] = []
        steps = {"text": self._take_text, "call": self._take_call, "after": self._take_after}
        while steps[self._state](parts, last=last):
            pass
        return parts

    def _take_text(self, parts: list[_Part], *, last: bool) -> bool:
        if self._format in UNMARKED:
            return self._take_unmarked(parts, last=last)
        marks = (self._begin, *(OPENING[self._format] if self._format == "qwen3_coder" else ()))
        found = re.search("|".join(map(re.escape, marks)), self._buffer)
        if found is not None:
            before, rest = self._buffer[: found.start()], self._buffer[found.end() :]
            self._state = "call"
            self._mark, self._buffer = (found[0], rest) if found[0] == self._begin else ("", found[0] + rest)
        else:
            held = 0 if last else held_back(self._buffer, marks)
            cut = len(self._buffer) - held
            before, self._buffer = self._buffer[:cut], self._buffer[cut:]
        if before:
            parts.append(before)
        return found is not None

    def _take_unmarked(self, parts: list[_Part], *, last: bool) -> bool:
        """Take text of a format whose calls need no mark: they are the whole completion."""
        found = self._buffer.lstrip()
        if self._is_start and not last and self._begin.startswith(found):
            return False
        if self._is_start and found.startswith((self._begin, *OPENING[self._format])):
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
            return False if self._may_begin() and not last else self._stays_text(parts)
        end = self._end.find(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return self._stays_text(parts) if last else False
        end += self._scanned
        calls = self._calls(self._buffer[self._value_at : end])
        if not calls:
            return self._stays_text(parts)
        parts += calls
        self._state, self._buffer = "after", self._buffer[end:]
        self._scan()
        return True

    def _may_begin(self) -> bool:
        """Whether the value of a call may still begin behind the buffer."""
        if self._format == "qwen3_coder":
            return OPENING[self._format][0].startswith(self._buffer.lstrip())
        return "{" not in self._buffer and len(self._buffer) < MAX_HEADER

    def _calls(self, text: str) -> list[_CallPart]:
        if self._format == "qwen3_coder":
            call = xml_call(text, self._parameters)
            calls = [call] if call is not None else []
        elif self._format == "pythonic":
            calls = python_calls(text)
        else:
            return _json_calls(text, self._name)
        return [_CallPart(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]

    def _find_value(self) -> bool:
        """Find the beginning of the value, and before it the name in one of Mistral's formats."""
        text = self._buffer.lstrip()
        if text.startswith(OPENING[self._format]):
            self._value_at = self._scanned = len(self._buffer) - len(text)
        elif self._format == "mistral" and (header := HEADER.match(self._buffer)):
            self._name, self._value_at, self._scanned = header[1], header.end(), header.end()
        return self._value_at >= 0

    def _stays_text(self, parts: list[_Part]) -> bool:
        text = self._mark
        if not text and self._format == "qwen3_coder":  # the beginning of a function, which is a mark of its own
            text = OPENING[self._format][0]
            self._buffer = self._buffer.removeprefix(text)
        if text:
            parts.append(text)
        self._state, self._is_start = "text", False
        self._scan()
        return True

    def _take_after(self, parts: list[_Part], *, last: bool) -> bool:
        """Skip what separates a call from the next one."""
        del parts
        self._buffer = self._buffer.lstrip()
        separator = END[self._format]
        if separator and self._buffer.startswith(separator):
            self._buffer = self._buffer.removeprefix(separator)
            return True
        if not self._buffer or (separator.startswith(self._buffer) and not last):
            return False
        self._state = "text"
        return True


def _json_calls(text: str, name: str | None) -> list[_CallPart]:
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


class _Enforced(ABC):
    """A parser of calls that a grammar enforces: their parts are returned as they arrive.

    in_call: a part of a call has been returned, and its end has not.
    """

    def __init__(self) -> None:
        self.in_call = self._has_calls = False
        self._buffer = ""

    def push(self, text: str, *, last: bool) -> list[_Part]:
        """Add text; return the parts that are final with it. last: no further text follows."""
        self._buffer += text
        parts: list[_Part] = []
        while self._buffer and self._take(parts):
            pass
        if last and not self._has_calls and self._buffer:
            parts.append(self._buffer)
        return parts

    @abstractmethod
    def _take(self, parts: list[_Part]) -> bool:
        """Take the next part from the buffer; return False if it is not complete."""

    def _begin(self, header: re.Match[str], name: str, arguments: str = "") -> list[_Part]:
        """Take the header of a call; return its parts."""
        self._buffer, self.in_call, self._has_calls = self._buffer[header.end() :], True, True
        return [_CallPart(name, ""), *([_CallPart(None, arguments)] if arguments else [])]

    def _value(self, end: int | None) -> _CallPart:
        """Take text of the arguments up to a position; None: all of it."""
        taken, self._buffer = (self._buffer, "") if end is None else (self._buffer[:end], self._buffer[end:])
        return _CallPart(None, taken)


class _EnforcedJson(_Enforced):
    """The parser of enforced calls whose arguments are JSON."""

    def __init__(self, call_format: ToolFormat) -> None:
        super().__init__()
        self._header = re.compile(ENFORCED_HEADER[call_format])
        self._end = ValueEnd()

    def _take(self, parts: list[_Part]) -> bool:
        if self.in_call:
            end = self._end.find(self._buffer)
            parts.append(self._value(end))
            self.in_call = end is None
        elif (header := self._header.search(self._buffer)) is not None:
            parts += self._begin(header, next(name for name in header.groups() if name))
            self._end = ValueEnd()
        else:
            return False
        return True


class _EnforcedXml(_Enforced):
    """The parser of enforced calls in the XML form: each parameter is returned when it is complete."""

    def __init__(self, parameters: Mapping[str, Schemas]) -> None:
        super().__init__()
        self._parameters = parameters
        self._schemas: Schemas = {}
        self._count = 0

    def _take(self, parts: list[_Part]) -> bool:
        if not self.in_call:
            if (header := re.search(FUNCTION, self._buffer)) is None:
                return False
            self._schemas, self._count = self._parameters.get(header[1], {}), 0
            parts += self._begin(header, header[1])
        elif (found := PARAMETER.match(self._buffer)) is not None:
            value = json.dumps(xml_value(found[2], self._schemas.get(found[1])), ensure_ascii=False)
            before = ", " if self._count else "{"
            parts.append(_CallPart(None, f"{before}{json.dumps(found[1])}: {value}"))
            self._count, self._buffer = self._count + 1, self._buffer[found.end() :]
        elif (end := re.match(rf"\s*{END_FUNCTION}", self._buffer)) is not None:
            parts.append(_CallPart(None, "}" if self._count else "{}"))
            self.in_call, self._buffer = False, self._buffer[end.end() :]
        else:
            return False
        return True


class _EnforcedPython(_Enforced):
    """The parser of enforced calls in the Python form, whose values are JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._end: ValueEnd | None = None  # of the value that has begun

    def _take(self, parts: list[_Part]) -> bool:
        if self._end is not None:
            end = self._end.find(self._buffer)
            parts.append(self._value(end))
            self._end = self._end if end is None else None
        elif not self.in_call:
            if (header := re.search(rf"{NAME}\(", self._buffer)) is None:
                return False
            parts += self._begin(header, header[1], "{")
        elif self._buffer.startswith(")"):
            parts.append(_CallPart(None, "}"))
            self.in_call, self._buffer = False, self._buffer[1:]
        elif (found := re.match(r"(, )?([^\s<>=(),\"']{1,64})=", self._buffer)) is not None:
            parts.append(_CallPart(None, f"{found[1] or ''}{json.dumps(found[2])}: "))
            self._buffer, self._end = self._buffer[found.end() :], ValueEnd(followed_by=",)")
        else:
            return False
        return True


NAME = r"([a-zA-Z0-9_.-]{1,64})"
OBJECT_HEADER = rf'\{{"name": "{NAME}", "(?:arguments|parameters)": (?=\{{)'
ENFORCED_HEADER = {
    "hermes": OBJECT_HEADER,
    "llama3_json": OBJECT_HEADER,
    "mistral": rf"{OBJECT_HEADER}|\[TOOL_CALLS\]{NAME}\[ARGS\](?=\{{)",
}
"""What comes before the arguments of a call that a grammar enforces, in the formats of JSON."""


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a mark."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
