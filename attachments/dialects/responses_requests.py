"""Requests of /v1/responses, translated to requests of /v1/chat/completions.

The server stores nothing: `input` contains the whole conversation, as a text or as items.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from clotho.serving.openai_requests import decode_fields, validated_chat
from clotho.serving.services import ServerContext
from protocols.sampling import TopLogprobs

NOT_STORED = ("previous_response_id", "conversation", "prompt")
"""Fields that name what a server has stored."""

WITHOUT_EFFECT = ("store", "stream_options", "max_tool_calls")
"""Fields that are accepted: no response is stored, events are not padded, and no tool runs on the server."""

PARAMETERS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "truncate_prompt_tokens": "truncation",
}
"""Field of a chat request -> the field of /v1/responses that it comes from."""

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Part(Struct, frozen=True, kw_only=True):
    """One part of an item. Only parts with text are supported; fields of other types are not decoded."""

    type: str
    text: str = ""
    refusal: str = ""


Content = str | Annotated[list[Part], Meta(max_length=MAX_MESSAGES)]


class InputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the conversation. Fields of earlier responses, such as `id` and `status`, are not decoded."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class InputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call by the model. arguments: JSON text of an object."""

    call_id: str
    name: str
    arguments: str


class InputCallOutput(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of a call."""

    call_id: str
    output: Content


class InputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model; its summary is not rendered if there is a content."""

    content: list[Part] | None = None
    summary: list[Part] = []


Item = InputMessage | InputCall | InputCallOutput | InputReasoning
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class ResponseTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call. parameters: JSON schema of the arguments."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function that the model has to call."""

    type: Literal["function"]
    name: str


class TextFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format of messages. schema, name, description, strict: of the type json_schema, as in `JsonSchema`."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The output of text. verbosity: has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reasoning. The fields beside `effort` have no effect: reasoning is returned as it is, without a summary."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Additional output. Only log-probabilities exist; the others belong to tools and inputs that this server lacks."""


class CreateResponse(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses.

    truncation: `auto` keeps the last tokens of an input that does not fit into the context. request_id: name under
    which the request can be aborted.
    """

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Includable] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    background: Literal[False] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    request_id: RequestId | None = None


class ResponsesRequest(ValidatedRequest, frozen=True, kw_only=True):
    """A validated request with the fields that the response repeats."""

    fields: CreateResponse


def parse_responses_request(body: bytes, context: ServerContext) -> ResponsesRequest:
    """Parse the body of /v1/responses and apply the chat template. Raises ApiError."""
    fields = decode_fields(_typed(json_object(body)), CreateResponse)
    try:
        request = validated_chat(_chat_request(fields, context), context)
    except ApiError as error:
        detail = error.body.error
        if (param := PARAMETERS.get(detail.param or "")) is None:
            raise
        raise invalid_field(param, detail.message.removeprefix(f"{detail.param}: ")) from error
    grammar = request.grammar
    if grammar is not None:
        grammar = structs.replace(grammar, param=PARAMETERS.get(grammar.param, grammar.param))
    return ResponsesRequest(**(structs.asdict(request) | {"grammar": grammar}), fields=fields)


def _typed(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose items all have a type, without fields that have no effect. Raises ApiError."""
    if named := [name for name in NOT_STORED if body.get(name) is not None]:
        raise invalid_field(named[0], "this server stores no responses; send the items of the conversation in `input`")
    fields = {name: value for name, value in body.items() if name not in (*NOT_STORED, *WITHOUT_EFFECT)}
    if isinstance(fields.get("input"), list):
        items = [{"type": "message"} | item if isinstance(item, dict) else item for item in fields["input"]]
        fields["input"] = items
        _require_type("input", items, ITEM_TYPES)
    if isinstance(fields.get("tools"), list):
        _require_type("tools", fields["tools"], ("function",))
    return fields


def _require_type(param: str, entries: list[Any], known: Sequence[str]) -> None:
    for index, entry in enumerate(entries):
        kind = entry.get("type") if isinstance(entry, dict) else None
        if isinstance(kind, str) and kind not in known:
            raise invalid_field(param, f"entry {index} has the type {kind[:64]!r}; use {', '.join(known)}")


def _chat_request(fields: CreateResponse, context: ServerContext) -> ChatRequest:
    sampling = {name: getattr(fields, name) for name in SamplingFields.__struct_fields__}
    if (output := _output_format(fields)) is not None:
        if fields.response_format is not None:
            raise invalid_field("text", "its format cannot be combined with response_format")
        sampling["response_format"] = output
    named = fields.tool_choice
    choice = (
        named
        if not isinstance(named, NamedFunction)
        else ToolChoice(type="function", function=FunctionChoice(name=named.name))
    )
    limit = fields.max_output_tokens
    return ChatRequest(
        **sampling,
        messages=_messages(fields),
        model=fields.model,
        max_tokens=limit,
        tools=[_tool(tool) for tool in fields.tools or []],
        tool_choice=choice,
        parallel_tool_calls=fields.parallel_tool_calls,
        reasoning_effort=fields.reasoning.effort if fields.reasoning else None,
        logprobs="message.output_text.logprobs" in (fields.include or []) or fields.top_logprobs is not None,
        top_logprobs=fields.top_logprobs,
        truncate_prompt_tokens=max(1, context.context_length - (limit or 1)) if fields.truncation == "auto" else None,
        stream=fields.stream,
        seed=fields.seed,
        stop=fields.stop,
        chat_template_kwargs=fields.chat_template_kwargs,
        request_id=fields.request_id,
    )


def _output_format(fields: CreateResponse) -> OutputFormat | None:
    found = fields.text.format if fields.text else None
    if found is None:
        return None
    if (found.type == "json_schema") != (found.schema is not None):
        raise invalid_field("text", "a format of type json_schema requires a schema, and no other type has one")
    schema = None
    if found.schema is not None:
        schema = JsonSchema(schema=found.schema, name=found.name, strict=found.strict)
    return OutputFormat(type=found.type, json_schema=schema)


def _tool(tool: ResponseTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


class _Turn:
    """The items of one turn of the assistant, which are one message of a conversation."""

    def __init__(self) -> None:
        self.reasoning, self.content, self.calls = "", "", list[ToolCall]()

    def continues_with(self, item: Item) -> bool:
        """Whether an item belongs to this turn: reasoning and text come before the calls of a turn."""
        of_assistant = isinstance(item, InputReasoning) or (isinstance(item, InputMessage) and item.role == "assistant")
        return isinstance(item, InputCall) or (of_assistant and not self.content and not self.calls)

    def messages(self) -> list[Message]:
        """Return the message of the turn; none if it has no items."""
        if not (self.content or self.calls or self.reasoning):
            return []
        calls, reasoning = self.calls or None, self.reasoning or None
        return [Message(role="assistant", content=self.content, tool_calls=calls, reasoning_content=reasoning)]


def _messages(fields: CreateResponse) -> list[Message]:
    """Return the instructions and the items as messages."""
    items = [InputMessage(role="user", content=fields.input)] if isinstance(fields.input, str) else fields.input
    names = {item.call_id: item.name for item in items if isinstance(item, InputCall)}
    messages = [Message(role="system", content=fields.instructions)] if fields.instructions else []
    turn = _Turn()
    for index, item in enumerate(items):
        if not turn.continues_with(item):
            messages += turn.messages()
            turn = _Turn()
        match item:
            case InputMessage(role="assistant"):
                turn.content = _text(item.content, index)
            case InputReasoning():
                turn.reasoning += _text(item.content or item.summary, index)
            case InputCall():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                turn.calls.append(ToolCall(id=item.call_id, function=function))
            case InputCallOutput():
                text, name = _text(item.output, index), names.get(item.call_id)
                messages.append(Message(role="tool", content=text, tool_call_id=item.call_id, name=name))
            case InputMessage():
                _append(messages, Message(role=item.role, content=_text(item.content, index)))
    return messages + turn.messages()


def _append(messages: list[Message], message: Message) -> None:
    """Append a message. A first system message behind the instructions joins them: many templates permit one."""
    if len(messages) == 1 and messages[0].role == "system" and message.role in ("system", "developer"):
        messages[0] = structs.replace(messages[0], content=f"{messages[0].content}\n\n{message.content}")
    else:
        messages.append(message)


def _text(content: Content, index: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in TEXT_PARTS:
            raise invalid_field("input", f"item {index} has a part of type {part.type[:64]!r}; only text is supported")
    return "".join(part.text or part.refusal for part in content)
