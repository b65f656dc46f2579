"""Tools of a chat request: definitions, the grammar that enforces a call, and calls in the text of a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NoReturn, Protocol

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from clotho.serving.errors import invalid_field
from protocols.constraints import Grammar

MAX_TOOLS, MAX_CALLS = 128, 32

ToolFormat = Literal["hermes", "llama3_json", "mistral"]
"""How a model writes tool calls:

    hermes       <tool_call>{"name": ..., "arguments": ...}</tool_call> for each call (Hermes, Qwen)
    llama3_json  {"name": ..., "parameters": ...}, separated by semicolons (Llama 3)
    mistral      [TOOL_CALLS] and a list of {"name": ..., "arguments": ...}, or [TOOL_CALLS]name[ARGS]{...} per call
"""

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
        raise invalid_field("messages", "the chat template of this model knows no tools")
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

    rendered: for the chat template. format: None if no calls are expected. grammars: the one that enforces a call, if
    any. parallel: whether several calls are permitted.
    """

    rendered: list[dict[str, Any]]
    format: ToolFormat | None
    grammars: tuple[Grammar, ...]
    parallel: bool


NO_TOOLS = ToolUse(rendered=[], format=None, grammars=(), parallel=True)


def tool_format(template: str, setting: str) -> ToolFormat:
    """Return the format of a model's tool calls, from its chat template unless it is set. Raises ApiError."""
    if not knows_tools(template):
        raise invalid_field("tools", "the chat template of this model knows no tools")
    known: dict[str, ToolFormat] = {one: one for one in ("hermes", "llama3_json", "mistral")}
    if setting in known:
        return known[setting]
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    raise invalid_field("tools", "the format of this model's tool calls is unknown; set server.tool_parser")


def use_tools(
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    *,
    parallel: bool,
    template: str,
    setting: str,
    encode: Callable[[str], tuple[int, ...]],
) -> ToolUse:
    """Return how a request uses its tools. Raises ApiError.

    With tool_choice none, the chat template receives no tools. encode: returns the tokens of a mark such as
    `[TOOL_CALLS]`, which a grammar names by its token if it is one.
    """
    if not tools:
        raise invalid_field("tool_choice", "requires tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_field("tools", "two functions have the same name")
    if choice == "none":
        return NO_TOOLS
    found = tool_format(template, setting)
    forced = list(tools)
    if isinstance(choice, ToolChoice):
        forced = [tool for tool in tools if tool.function.name == choice.function.name]
        if not forced:
            raise invalid_field("tool_choice", f"no tool has the name {choice.function.name[:64]!r}")
        parallel = False
    grammars: tuple[Grammar, ...] = ()
    if choice == "required" or isinstance(choice, ToolChoice):
        text = call_grammar(forced, found, parallel=parallel, has_args_mark="[ARGS]" in template, encode=encode)
        grammars = (Grammar(kind="lark", text=text, param="tools"),)
    rendered = [msgspec.to_builtins(tool) for tool in tools]
    for tool in rendered:
        tool["function"] = {name: value for name, value in tool["function"].items() if value is not None}
    return ToolUse(rendered=rendered, format=found, grammars=grammars, parallel=parallel)


def call_grammar(
    tools: Sequence[Tool],
    call_format: ToolFormat,
    *,
    parallel: bool,
    has_args_mark: bool,
    encode: Callable[[str], tuple[int, ...]],
) -> str:
    """Return the grammar of one call, or of up to `MAX_CALLS`, in the syntax of llguidance's Lark."""

    def mark(text: str) -> str:
        tokens = encode(text)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 else json.dumps(text)

    def calls(separator: str) -> str:
        return f'call ("{separator}" call){{0,{MAX_CALLS - 1}}}' if parallel else "call"

    if call_format == "hermes":
        start = calls("\\n")
        head, tail = ('{mark} "\\n{{\\"name\\": \\"{name}\\", \\"arguments\\": "', f'"}}\\n" {mark("</tool_call>")}')
        begin = mark("<tool_call>")
    elif call_format == "llama3_json":
        start, begin = calls("; "), ""
        head, tail = '{mark} "{{\\"name\\": \\"{name}\\", \\"parameters\\": "', '"}"'
    elif has_args_mark:
        start, begin = f"call{{1,{MAX_CALLS}}}" if parallel else "call", mark("[TOOL_CALLS]")
        head, tail = f'{{mark}} "{{name}}" {mark("[ARGS]")}', ""
    else:
        start, begin = f'{mark("[TOOL_CALLS]")} / ?/ "[" {calls(", ")} "]"', ""
        head, tail = '{mark} "{{\\"name\\": \\"{name}\\", \\"arguments\\": "', '"}"'
    rules = [f"start: {start}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        schema = {"type": "object", **(tool.function.parameters or {"properties": {}, "additionalProperties": False})}
        rules.append(f"call_{i}: {head.format(mark=begin, name=tool.function.name)} args_{i} {tail}")
        rules.append(f"args_{i}: %json {json.dumps(schema)}")
    return "\n".join(["%llguidance {}", *rules])
