"""Requests of /v1/messages, Anthropic's API, translated to requests of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from clotho.serving.bodies import json_object
from clotho.serving.chat_extension import ValidatedRequest
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.openai_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CalledFunction,
    ChatRequest,
    Function,
    FunctionChoice,
    FunctionName,
    JsonSchema,
    Limit,
    Message,
    OutputFormat,
    ReasoningEffort,
    RequestId,
    SamplingFields,
    Seed,
    TemplateVariables,
    Tool,
    ToolCall,
    ToolChoice,
)
from clotho.serving.openai_requests import decode_fields, rendered_chat, validated_chat
from clotho.serving.services import ServerContext, find_served

WITHOUT_EFFECT = ("cache_control", "inference_geo")
"""Fields that are accepted: the prefix cache needs no marks, and there is one place of inference."""

PARAMETERS = {"stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "thinking"}
"""Field of a chat request -> the field of /v1/messages that it comes from."""

EFFORTS: dict[str, ReasoningEffort] = {
    "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh",
}  # fmt: skip

CHOICES: dict[str, Literal["none", "auto", "required"]] = {"none": "none", "auto": "auto", "any": "required"}

BLOCK_TYPES = ("text", "thinking", "tool_use", "tool_result")


class TextBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of a message, of the system prompt, or of the result of a call."""

    text: str


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. Its signature is not decoded."""

    thinking: str


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call by the model."""

    id: str
    name: str
    input: dict[str, Any]


Texts = str | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)]


class ToolResultBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call. That it is an error, chat templates do not say."""

    tool_use_id: str
    content: Texts = ""


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class AnthropicMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_MESSAGES)]


class MessageTool(Struct, frozen=True, kw_only=True):
    """A tool of the client. input_schema: JSON schema of the input."""

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class MessageToolChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tool the model has to use. name: of the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, frozen=True, kw_only=True):
    """The reasoning. `adaptive` leaves its length to the model."""

    type: str
    display: Literal["summarized"] | None = None


class JsonOutput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A format of the text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The effort of the reasoning, and the format of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class CountTokens(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages/count_tokens: the fields that a prompt depends on."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: Texts | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateVariables | None = None


class CreateMessage(CountTokens, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages. request_id: name under which the request can be aborted."""

    max_tokens: Limit
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    seed: Seed | None = None
    request_id: RequestId | None = None


class MessagesRequest(ValidatedRequest, frozen=True, kw_only=True):
    """A validated request. max_tokens: as requested; the context may have less room."""

    max_tokens: int


class TokenCount(Struct, frozen=True, kw_only=True):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


def parse_messages_request(body: bytes, context: ServerContext) -> MessagesRequest:
    """Parse the body of /v1/messages and apply the chat template. Raises ApiError."""
    fields = decode_fields(_served(json_object(body)), CreateMessage)
    chat = structs.replace(
        _chat_request(fields),
        max_tokens=fields.max_tokens,
        stop=fields.stop_sequences,
        stream=fields.stream,
        seed=fields.seed,
        request_id=fields.request_id,
    )
    try:
        request = validated_chat(chat, context, fit_context=True)
    except ApiError as error:
        raise _renamed(error) from error
    grammar = request.grammar
    if grammar is not None:
        grammar = structs.replace(grammar, param=PARAMETERS.get(grammar.param, grammar.param))
    return MessagesRequest(**(structs.asdict(request) | {"grammar": grammar}), max_tokens=fields.max_tokens)


def count_tokens(body: bytes, context: ServerContext) -> TokenCount:
    """Return the response of /v1/messages/count_tokens. Raises ApiError."""
    fields = decode_fields(_served(json_object(body)), CountTokens)
    find_served(fields.model, context)
    try:
        _, _, prompt = rendered_chat(_chat_request(fields), context)
    except ApiError as error:
        raise _renamed(error) from error
    return TokenCount(input_tokens=len(prompt))


def _renamed(error: ApiError) -> ApiError:
    """Return an error that names the field of this API."""
    detail = error.body.error
    if (param := PARAMETERS.get(detail.param or "")) is None:
        return error
    return invalid_field(param, detail.message.removeprefix(f"{detail.param}: "))


def _served(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without fields that have no effect. Raises ApiError for types that this server does not serve."""
    for entry in _objects(body.get("messages")):
        _require_blocks("messages", entry.get("content"), BLOCK_TYPES)
        for block in _objects(entry.get("content")):
            _require_blocks("messages", block.get("content"), ("text",))
    _require_blocks("system", body.get("system"), ("text",))
    for index, tool in enumerate(_objects(body.get("tools"))):
        if tool.get("type") not in (None, "custom"):
            kind = str(tool["type"])[:64]
            raise invalid_field("tools", f"tool {index} has the type {kind!r}, which runs on the server; define a tool")
    for thinking in _objects([body.get("thinking")]):
        if thinking.get("type") not in ("adaptive", "disabled"):
            kind = str(thinking.get("type"))[:64]
            text = f"the type {kind!r} is not served, because no budget limits the reasoning; use adaptive or disabled"
            raise invalid_field("thinking", text)
    return {name: value for name, value in body.items() if name not in WITHOUT_EFFECT}


def _objects(entries: Any) -> Iterable[dict[str, Any]]:
    return (entry for entry in entries if isinstance(entry, dict)) if isinstance(entries, list) else ()


def _require_blocks(param: str, blocks: Any, known: Sequence[str]) -> None:
    for block in _objects(blocks):
        kind = block.get("type")
        if isinstance(kind, str) and kind not in known:
            raise invalid_field(param, f"a block has the type {kind[:64]!r}; this server knows {', '.join(known)}")


def _chat_request(fields: CountTokens) -> ChatRequest:
    sampling = {name: getattr(fields, name) for name in SamplingFields.__struct_fields__}
    config = fields.output_config or OutputConfig()
    if config.format is not None:
        if fields.response_format is not None:
            raise invalid_field("output_config", "its format cannot be combined with response_format")
        schema = JsonSchema(schema=config.format.schema)
        sampling["response_format"] = OutputFormat(type="json_schema", json_schema=schema)
    messages = _messages(fields)
    continues = messages[-1].role == "assistant" and not messages[-1].tool_calls
    choice = fields.tool_choice or MessageToolChoice(type="auto")
    return ChatRequest(
        **sampling,
        messages=messages,
        model=fields.model,
        add_generation_prompt=False if continues else None,
        continue_final_message=continues,
        tools=[_tool(tool) for tool in fields.tools or []],
        tool_choice=_tool_choice(choice) if fields.tools or choice.type != "auto" else None,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        reasoning_effort=_effort(fields.thinking, config),
        chat_template_kwargs=fields.chat_template_kwargs,
    )


def _tool(tool: MessageTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def _tool_choice(choice: MessageToolChoice) -> Literal["none", "auto", "required"] | ToolChoice:
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise invalid_field("tool_choice", "the type tool needs the name of the tool")
    return ToolChoice(type="function", function=FunctionChoice(name=choice.name))


def _effort(thinking: Thinking | None, config: OutputConfig) -> ReasoningEffort | None:
    """Return the reasoning effort; None leaves it to the chat template."""
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if config.effort is not None:
        return EFFORTS[config.effort]
    return None if thinking is None else "medium"


def _messages(fields: CountTokens) -> list[Message]:
    """Return the system prompt and the blocks as messages."""
    messages = [Message(role="system", content=_text(fields.system))] if fields.system else []
    names: dict[str, str] = {}
    for message in fields.messages:
        content = message.content
        blocks = [TextBlock(text=content)] if isinstance(content, str) else content
        if message.role == "assistant":
            names |= {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
            messages.append(_assistant(blocks))
        else:
            messages += _given(message.role, blocks, names)
    return messages


def _assistant(blocks: Sequence[Block]) -> Message:
    calls = [
        ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=json.dumps(block.input)))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise invalid_field("messages", "a tool_result is part of a message of the user")
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    return Message(role="assistant", content=text, tool_calls=calls or None, reasoning_content=thinking or None)


def _given(role: Literal["user", "system"], blocks: Sequence[Block], names: dict[str, str]) -> list[Message]:
    """Return what the client adds: results of calls, and the text between them. names: of the functions, by call."""
    messages, texts = list[Message](), list[str]()
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                if texts:
                    messages.append(Message(role=role, content="".join(texts)))
                    texts = []
                result = Message(
                    role="tool",
                    content=_text(block.content),
                    tool_call_id=block.tool_use_id,
                    name=names.get(block.tool_use_id),
                )
                messages.append(result)
            case _:
                raise invalid_field("messages", "thinking and tool_use are parts of messages of the assistant")
    if texts or not messages:
        messages.append(Message(role=role, content="".join(texts)))
    return messages


def _text(content: Texts) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
