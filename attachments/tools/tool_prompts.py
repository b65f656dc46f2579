"""Tools as text of a conversation, for models whose chat template knows no tools.

A grammar enforces the calls of such a request, in the format `hermes`; the model only has to learn what it can call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec import structs

from attachments.tools.tool_calls import definition
from clotho.serving.openai_fields import ContentPart, Message, Tool


def tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a conversation that describes the tools, and contains earlier calls and their results, as text."""
    functions = "\n".join(json.dumps(definition(tool)["function"], ensure_ascii=False) for tool in tools)
    form = _call("NAME", "{...}")
    described = f"Answer with calls of these functions, each in this form:\n{form}\n<tools>\n{functions}\n</tools>"
    first = messages[0]
    if first.role in ("system", "developer"):
        return [_between("", first, f"\n\n{described}"), *map(_as_text, messages[1:])]
    return [Message(role="system", content=described), *map(_as_text, messages)]


def _as_text(message: Message) -> Message:
    if message.role == "tool":
        result = Message(role="user", content=message.content)
        return _between("<tool_response>\n", result, "\n</tool_response>")
    if message.tool_calls:
        calls = [_call(json.dumps(call.function.name), call.function.arguments) for call in message.tool_calls]
        return _between(
            "", structs.replace(message, tool_calls=None), "\n".join(["", *calls] if message.content else calls)
        )
    return message


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _between(before: str, message: Message, after: str) -> Message:
    """Return a message with text before and after its content."""
    content = message.content or []
    parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content
    added = [ContentPart(type="text", text=text) for text in (before, after)]
    return structs.replace(message, content=[added[0], *parts, added[1]])
