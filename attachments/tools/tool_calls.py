"""Tools of a chat request: definitions, calls in messages, and calls in responses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, Protocol

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from clotho.serving.errors import invalid_field
from protocols.constraints import Grammar

MAX_TOOLS, MAX_CALLS = 128, 32

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

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call. parameters: JSON schema of the arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of a request."""

    type: Literal["function"]
    function: Function


def definition(tool: Tool) -> dict[str, Any]:
    """Return the definition of a tool as chat templates read it, without absent fields."""
    function = {name: value for name, value in structs.asdict(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}


class FunctionChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class ToolChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function that the model has to call."""

    type: Literal["function"]
    function: FunctionChoice


class CalledFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in a message. arguments: JSON text of an object."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in a message of the assistant."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class CallDelta(Struct, frozen=True, kw_only=True):
    """The new part of call `index`: its id and name in the first part, and text of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class FunctionDelta(Struct, frozen=True, kw_only=True):
    """The function of a call in a response."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A call in a response, or its new part in a stream. index: in streams only."""

    function: FunctionDelta
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class CallingMessage(Protocol):
    """The fields of a message that concern tools and reasoning."""

    @property
    def role(self) -> str:
        """Who wrote the message."""
        ...

    @property
    def name(self) -> str | None:
        """Name of the tool."""
        ...

    @property
    def tool_calls(self) -> list[ToolCall] | None:
        """Calls of the assistant."""
        ...

    @property
    def tool_call_id(self) -> str | None:
        """The call that a message of a tool answers."""
        ...

    @property
    def reasoning_content(self) -> str | None:
        """Reasoning of the assistant."""
        ...


def message_fields(message: CallingMessage, index: int, template: str) -> dict[str, Any]:
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


def call_deltas(calls: Sequence[CallDelta], *, whole: bool) -> list[ToolCallDelta]:
    """Return calls in the format of a response."""
    return [
        ToolCallDelta(
            function=FunctionDelta(name=call.name or UNSET, arguments=call.arguments),
            index=UNSET if whole else call.index,
            id=call.id or UNSET,
            type="function" if call.id else UNSET,
        )
        for call in calls
    ]


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
