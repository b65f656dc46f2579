"""How a request uses its tools: the format of calls, and grammars of required calls and of text with strict calls.

Grammars have the syntax of llguidance's Lark.

The arguments of a call follow the JSON schema of its function. In the formats `qwen3_coder` and `pythonic`, each
parameter is a text of its own: its order is that of the schema, and further keywords of the whole object do not apply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from attachments.tools.structured_outputs import json_rule, output_schema
from attachments.tools.tagged_text import Tag, TaggedText
from attachments.tools.tool_calls import (
    MAX_CALLS,
    NO_TEMPLATE,
    NO_TOOLS,
    ToolFormat,
    ToolUse,
    definition,
    is_text_parameter,
    knows_tools,
)
from clotho.serving.errors import invalid_field
from clotho.serving.openai_fields import OutputFormat, Tool, ToolChoice
from protocols.constraints import Grammar

MARKS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "pythonic": (),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
}
"""Texts of a format that may be tokens of their own."""

ANY_OBJECT = {"type": "object"}
REFERENCED = ("$defs", "definitions")


class Call(NamedTuple):
    """One call of a function: text, an expression of the grammar, and text. rules: of the expression."""

    begin: str
    arguments: str
    end: str
    rules: tuple[str, ...]


def tool_format(template: str, setting: str) -> ToolFormat:
    """Return the format of a model's tool calls, from its chat template unless it is set. Raises ApiError."""
    if not knows_tools(template):
        raise invalid_field("tools", NO_TEMPLATE)
    known: dict[str, ToolFormat] = {one: one for one in MARKS}
    if setting in known:
        return known[setting]
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if re.search(r"\[\w+\(\w+=", template):
        return "pythonic"
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
    output: OutputFormat | None,
) -> ToolUse:
    """Return how a request uses its tools. Raises ApiError.

    With tool_choice none, the chat template receives no tools. encode: returns the tokens of a mark such as
    `[TOOL_CALLS]`, which a grammar names by its token if it is one. output: the format of a completion without calls.
    """
    if not tools:
        raise invalid_field("tool_choice", "requires tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_field("tools", "two functions have the same name")
    if choice == "none":
        return NO_TOOLS
    enforced = choice == "required" or isinstance(choice, ToolChoice)
    as_text = enforced and not knows_tools(template)  # see `tools_as_text`
    found, has_args_mark = "hermes" if as_text else tool_format(template, setting), "[ARGS]" in template
    forced = list(tools)
    if isinstance(choice, ToolChoice):
        forced = [tool for tool in tools if tool.function.name == choice.function.name]
        if not forced:
            raise invalid_field("tool_choice", f"no tool has the name {choice.function.name[:64]!r}")
        parallel = False
    content = output_schema(output) if output is not None else None
    if enforced:
        grammar = required_calls(forced, found, parallel=parallel, has_args_mark=has_args_mark, encode=encode)
    elif content is not None or any(tool.function.strict for tool in tools):
        if output is not None and output.type == "structural_tag":
            raise invalid_field("response_format", "type structural_tag cannot be combined with strict tools")
        grammar = strict_calls(tools, found, parallel=parallel, has_args_mark=has_args_mark, content=content)
    else:
        grammar = None
    return ToolUse(
        rendered=[definition(tool) for tool in tools] if knows_tools(template) else [],
        format=found,
        grammars=() if grammar is None else (grammar,),
        enforced=enforced,
        parallel=parallel,
        parameters={tool.function.name: _properties(tool) for tool in tools},
    )


def _properties(tool: Tool) -> dict[str, Any]:
    found = (tool.function.parameters or {}).get("properties")
    return found if isinstance(found, dict) else {}


def required_calls(
    tools: Sequence[Tool],
    call_format: ToolFormat,
    *,
    parallel: bool,
    has_args_mark: bool,
    encode: Callable[[str], tuple[int, ...]],
) -> Grammar:
    """Return the grammar of one call, or of up to `MAX_CALLS`. encode: returns the tokens of a mark."""
    marks = {}
    for mark in MARKS[call_format]:
        tokens = encode(mark)
        if len(tokens) == 1:
            marks[mark] = f"<[{tokens[0]}]>"
    calls = [_call(tool, number, call_format, has_args_mark) for number, tool in enumerate(tools)]
    rules = [rule for call in calls for rule in call.rules]
    for number, call in enumerate(calls):
        rules.append(f"call_{number}: {_literal(call.begin, marks)} {call.arguments} {_literal(call.end, marks)}")
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    start = _sequence(call_format, parallel, has_args_mark)
    if call_format == "mistral" and not has_args_mark:
        start = f"{_literal('[TOOL_CALLS]', marks)} / ?/ {start}"
    return Grammar(kind="lark", text="\n".join(["%llguidance {}", f"start: {start}", *rules]), param="tools")


def strict_calls(
    tools: Sequence[Tool],
    call_format: ToolFormat,
    *,
    parallel: bool,
    has_args_mark: bool,
    content: dict[str, Any] | None,
) -> Grammar:
    """Return the grammar of text in which calls follow the schemas of strict functions.

    Calls of other functions have any arguments. content: JSON schema of a completion without calls; None: any text.
    """
    loose = [tool if tool.function.strict else _without_schema(tool) for tool in tools]
    calls = [_call(tool, number, call_format, has_args_mark) for number, tool in enumerate(loose)]
    rules = [rule for call in calls for rule in call.rules]
    trigger = MARKS[call_format][0] if call_format in ("hermes", "qwen3_coder", "mistral") else ""
    tags = [Tag(trigger=trigger, begin=call.begin, body=call.arguments, end=call.end) for call in calls]
    first = ""
    if not trigger or (call_format == "mistral" and not has_args_mark):
        for number, call in enumerate(calls):
            rules.append(f"call_{number}: {json.dumps(call.begin)} {call.arguments} {json.dumps(call.end)}")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        sequence = _sequence(call_format, parallel, has_args_mark)
        tags = [Tag(trigger=trigger, begin=trigger, body=f"/ ?/ {sequence}" if trigger else sequence, end="")]
        if call_format == "llama3_json":
            tags.append(_behind_mark(tags[0]))
        first = "" if trigger else r"[^\s\[]" if call_format == "pythonic" else r"[^\s{]"
    if content is not None:
        rules.append(f"sentence: {json_rule(content)}")
    text = TaggedText(
        tags=tuple(tags),
        rules="\n".join(rules),
        content="sentence" if content is not None else "",
        once=not parallel or not trigger,
        first=first,
    )
    return Grammar(kind="tagged", text=msgspec.json.encode(text).decode(), param="tools")


def _behind_mark(tag: Tag) -> Tag:
    """Return the calls of Llama behind their mark, which they may lack."""
    return Tag(trigger=MARKS["llama3_json"][0], begin=MARKS["llama3_json"][0], body=tag.body, end="")


def _without_schema(tool: Tool) -> Tool:
    parameters = tool.function.parameters
    names = parameters.get("properties") if parameters else None
    properties = dict.fromkeys(names, True) if isinstance(names, dict) else {}
    function = msgspec.structs.replace(tool.function, parameters={**ANY_OBJECT, "properties": properties})
    return msgspec.structs.replace(tool, function=function)


def _sequence(call_format: ToolFormat, parallel: bool, has_args_mark: bool) -> str:
    """Return the expression of one call or several."""
    separators: dict[ToolFormat, str] = {
        "hermes": "\n", "qwen3_coder": "\n", "llama3_json": "; ", "pythonic": ", ", "mistral": ", ",
    }  # fmt: skip
    if call_format == "mistral" and has_args_mark:
        return f"call{{1,{MAX_CALLS}}}" if parallel else "call"
    separator = json.dumps(separators[call_format])
    calls = f"call ({separator} call){{0,{MAX_CALLS - 1}}}" if parallel else "call"
    return f'"[" {calls} "]"' if call_format in ("pythonic", "mistral") else calls


def _call(tool: Tool, number: int, call_format: ToolFormat, has_args_mark: bool) -> Call:
    name, schema = tool.function.name, _schema(tool)
    match call_format:
        case "qwen3_coder":
            begin, end = f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"
            return Call(begin, f"args_{number}", end, tuple(_xml_arguments(schema, f"args_{number}")))
        case "pythonic":
            return Call(f"{name}(", f"args_{number}_0", ")", tuple(_keyword_arguments(schema, f"args_{number}")))
        case "hermes":
            begin, end = f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"
        case "llama3_json":
            begin, end = f'{{"name": "{name}", "parameters": ', "}"
        case "mistral" if has_args_mark:
            begin, end = f"[TOOL_CALLS]{name}[ARGS]", ""
        case "mistral":
            begin, end = f'{{"name": "{name}", "arguments": ', "}"
    return Call(begin, f"args_{number}", end, (f"args_{number}: {json_rule(schema)}",))


def _schema(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.function.parameters or {"properties": {}, "additionalProperties": False})}


class Parameter(NamedTuple):
    """A parameter of a function with the JSON schema of its value, which contains what it refers to."""

    name: str
    schema: Any
    required: bool


def _parameters(schema: Mapping[str, Any]) -> list[Parameter]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise invalid_field("tools", "parameters need an object of properties and a list of required names")
    if missing := [name for name in required if name not in properties]:
        raise invalid_field("tools", f"the required parameter {str(missing[0])[:64]!r} is no property")
    if wrong := [name for name in properties if not re.fullmatch(r"[^\s<>=(),\"']{1,64}", name)]:
        raise invalid_field("tools", f"{wrong[0][:64]!r} is not the name of a parameter in the format of this model")
    referenced = {key: schema[key] for key in REFERENCED if key in schema}
    return [
        Parameter(name, {**referenced, **one} if isinstance(one, dict) else one, name in required)
        for name, one in properties.items()
    ]


def _xml_arguments(schema: Mapping[str, Any], name: str) -> list[str]:
    """Return rules for `<parameter=NAME>` blocks. A text ends before the next end mark, or is one of an `enum`."""
    rules, blocks = [], []
    for number, parameter in enumerate(_parameters(schema)):
        rule, begin, end = f"{name}_{number}", json.dumps(f"<parameter={parameter.name}>\n"), "\n</parameter>\n"
        choices = parameter.schema.get("enum") if is_text_parameter(parameter.schema) else None
        if choices and all(isinstance(choice, str) for choice in choices):
            values = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            rules.append(f"{rule}: {begin} ({values}) {json.dumps(end)}")
        elif is_text_parameter(parameter.schema):
            rules += [f"{rule}: {begin} {rule}_text", f"{rule}_text[lazy]: /(?s:.*)/ {json.dumps(end)}"]
        else:
            rules.append(f"{rule}: {begin} {rule}_json {json.dumps(end)}")
            rules.append(f"{rule}_json: {json_rule(parameter.schema)}")
        blocks.append(rule if parameter.required else f"{rule}?")
    return [*rules, f"{name}: " + (" ".join(blocks) or '""')]


def _keyword_arguments(schema: Mapping[str, Any], name: str) -> list[str]:
    """Return rules for `NAME=VALUE, ...` with JSON values: `_K` and `_K_more` are the arguments from number K on."""
    parameters = _parameters(schema)
    rules = []
    for number, parameter in enumerate(parameters):
        rule, after = f"{name}_{number}", f"{name}_{number + 1}"
        rules.append(f"{rule}_value: {json.dumps(parameter.name + '=')} {rule}_json")
        rules.append(f"{rule}_json: {json_rule(parameter.schema)}")
        skipped, skipped_more = ("", "") if parameter.required else (f" | {after}", f" | {after}_more")
        rules.append(f"{rule}: {rule}_value {after}_more{skipped}")
        rules.append(f'{rule}_more: ", " {rule}_value {after}_more{skipped_more}')
    end = f"{name}_{len(parameters)}"
    return [*rules, f'{end}: ""', f'{end}_more: ""']


def _literal(text: str, marks: Mapping[str, str]) -> str:
    """Return a text as an expression, with marks as their tokens."""
    if not marks:
        return json.dumps(text)
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    return " ".join(marks[part] if part in marks else json.dumps(part) for part in parts if part) or '""'
