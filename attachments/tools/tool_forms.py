"""Tool calls that are not JSON: the XML form of Qwen3-Coder and the Python form of Llama."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from attachments.tools.tool_calls import is_text_parameter, refuse_constant

Arguments = dict[str, Any]
Schemas = Mapping[str, Any]
"""JSON schemas of the parameters of a function, by name."""

FUNCTION = re.compile(r"\s*<function=([a-zA-Z0-9_.-]{1,64})>")
PARAMETER = re.compile(r"\s*<parameter=([^\s<>]{1,64})>(.*?)</parameter>\s*", re.DOTALL)
END_FUNCTION = "</function>"

JSON_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
PYTHON_NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

TOKEN = re.compile(
    r"\s*(?:(?P<text>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_][\w.-]*)|(?P<mark>[\[\](){},:=]))",
    re.DOTALL,
)
MAX_DEPTH = 32


def xml_call(text: str, parameters: Mapping[str, Schemas]) -> tuple[str, Arguments] | None:
    """Return name and arguments of `<function=NAME><parameter=KEY>VALUE</parameter></function>`; None if it is none."""
    header = FUNCTION.match(text)
    if header is None or not text.endswith(END_FUNCTION):
        return None
    arguments, at, end = Arguments(), header.end(), len(text) - len(END_FUNCTION)
    schemas = parameters.get(header[1], {})
    while (found := PARAMETER.match(text, at, end)) is not None:
        arguments[found[1]], at = xml_value(found[2], schemas.get(found[1])), found.end()
    return (header[1], arguments) if not text[at:end].strip() else None


def xml_value(text: str, schema: Any) -> Any:
    """Return the value of a parameter: text, or JSON of a type that the schema permits."""
    text = text.removeprefix("\n").removesuffix("\n")
    if schema is None or is_text_parameter(schema):
        return text
    named = schema.get("type") if isinstance(schema, dict) else None
    types = set([named] if isinstance(named, str) else named or [])
    try:
        value = (
            PYTHON_NAMES[text.strip()]
            if text.strip() in PYTHON_NAMES
            else json.loads(text, parse_constant=refuse_constant)
        )
    except (ValueError, RecursionError):
        return text
    kind = JSON_TYPES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits else text


class _Invalid(Exception):
    """The text is no list of calls."""


def python_calls(text: str) -> list[tuple[str, Arguments]]:
    """Return name and arguments of each call in `[f(x=1, y="a"), g()]`; none if the text is no list of calls."""
    try:
        return _PythonReader(text).calls()
    except _Invalid:
        return []


class _PythonReader:
    """Reads calls with keyword arguments whose values are literals of Python or JSON."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def calls(self) -> list[tuple[str, Arguments]]:
        """Read the list."""
        self._expect("[")
        found = [self._call()]
        while self._skips(","):
            found.append(self._call())
        self._expect("]")
        if self._text[self._at :].strip():
            raise _Invalid
        return found

    def _call(self) -> tuple[str, Arguments]:
        name = self._next("name")
        self._expect("(")
        arguments = Arguments()
        while not self._skips(")"):
            if arguments:
                self._expect(",")
            key = self._next("name")
            self._expect("=")
            arguments[key] = self._value(0)
        return name, arguments

    def _value(self, depth: int) -> Any:
        found = TOKEN.match(self._text, self._at)
        if found is None or depth > MAX_DEPTH:
            raise _Invalid
        self._at = found.end()
        if found["text"] is not None:
            return _literal_text(found["text"])
        if found["number"] is not None:
            number = found["number"]
            return int(number) if re.fullmatch(r"-?\d{1,4000}", number) else float(number)
        if found["name"] is not None:
            if found["name"] not in PYTHON_NAMES:
                raise _Invalid
            return PYTHON_NAMES[found["name"]]
        if found["mark"] == "[":
            return self._items(depth)
        if found["mark"] == "{":
            return self._entries(depth)
        raise _Invalid

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._skips("]"):
            if items:
                self._expect(",")
            items.append(self._value(depth + 1))
        return items

    def _entries(self, depth: int) -> Arguments:
        entries = Arguments()
        while not self._skips("}"):
            if entries:
                self._expect(",")
            key = _literal_text(self._next("text"))
            self._expect(":")
            entries[key] = self._value(depth + 1)
        return entries

    def _next(self, kind: str) -> str:
        found = TOKEN.match(self._text, self._at)
        if found is None or found[kind] is None:
            raise _Invalid
        self._at = found.end()
        return str(found[kind])

    def _expect(self, mark: str) -> None:
        if self._next("mark") != mark:
            raise _Invalid

    def _skips(self, mark: str) -> bool:
        found = TOKEN.match(self._text, self._at)
        if found is None or found["mark"] != mark:
            return False
        self._at = found.end()
        return True


def _literal_text(token: str) -> str:
    """Return the text of a literal of JSON or of Python."""
    try:
        return str(json.loads(token, strict=False))
    except ValueError:
        pass
    try:
        text = str(ast.literal_eval(token.replace("\n", "\\n")))
        text.encode()
    except (ValueError, SyntaxError) as error:
        raise _Invalid from error
    return text
