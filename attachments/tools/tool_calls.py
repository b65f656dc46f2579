"""Tools of a chat request: definitions and calls, as chat templates read them."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NoReturn

from msgspec import Struct, structs

from clotho.serving.errors import invalid_field
from clotho.serving.openai_fields import Message, Tool, ToolCall
from protocols.constraints import Grammar

MAX_CALLS = 32

ToolFormat = Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral"]
"""How a model writes tool calls:

    hermes       <tool_call>{"name": ..., "arguments": ...}</tool_call> for each call (Hermes, Qwen)
    qwen3_coder  <tool_call><function=...> and <parameter=...>VALUE</parameter> for each parameter (Qwen3-Coder)
    llama3_json  {"name": ..., "parameters": ...}, separated by semicolons (Llama 3)
    pythonic     a list of Python calls with keyword arguments: [f(x=1), g(y="a")] (Llama 3.2, Llama 4)
    mistral      [TOOL_CALLS] and a list of {"name": ..., "arguments": ...}, or [TOOL_CALLS]name[ARGS]{...} per call
"""

NO_TEMPLATE = (
    "the chat template of this model knows no tools; a model of the ChatML format can be served with "
    "--model.chat-template tools-hermes"
)


def definition(tool: Tool) -> dict[str, Any]:
    """Return the definition of a tool as chat templates read it, without absent fields."""
    function = {name: value for name, value in structs.asdict(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}


def message_fields(message: Message, index: int, template: str) -> dict[str, Any]:
    """Return the fields of a message beside role and content, as chat templates read them. Raises ApiError."""
    if (message.tool_calls or message.reasoning_content is not None) and message.role != "assistant":
        raise invalid_field("messages", f"message {index} has fields of the role assistant")
    if message.tool_call_id and message.role != "tool":
        raise invalid_field("messages", f"message {index} has fields of the role tool")
    if (message.tool_calls or message.role == "tool") and not knows_tools(template):
        raise invalid_field("messages", NO_TEMPLATE)
    found = {"tool_call_id": message.tool_call_id, "reasoning_content": message.reasoning_content}
    fields: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    if message.role == "tool" and message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [_rendered_call(call, index) for call in message.tool_calls]
    return fields


def _rendered_call(call: ToolCall, index: int) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}", parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid_field("messages", f"message {index} has a call whose arguments are not a JSON object")
    identifier = {} if call.id is None else {"id": call.id}
    return {**identifier, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python's JSON decoder accepts."""
    raise ValueError(f"{name} is not JSON")


def knows_tools(template: str) -> bool:
    """Whether a chat template renders tools."""
    return bool(re.search(r"\btools\b", template))


def is_text_parameter(schema: Any) -> bool:
    """Whether the value of a parameter is text in formats that write other values as JSON."""
    return isinstance(schema, dict) and schema.get("type") == "string"


class ToolUse(Struct, frozen=True, kw_only=True):
    """The tools of a validated request.

    rendered: for the chat template. format: None if no calls are expected. grammars: the one of calls, if any.
    enforced: the completion is calls and nothing else. parallel: whether several calls are permitted. parameters: JSON
    schemas of the parameters of each function.
    """

    rendered: list[dict[str, Any]]
    format: ToolFormat | None
    grammars: tuple[Grammar, ...] = ()
    enforced: bool = False
    parallel: bool = True
    parameters: dict[str, dict[str, Any]] = {}


NO_TOOLS = ToolUse(rendered=[], format=None)
