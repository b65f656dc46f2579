"""Fields of requests, as the structs that decode the bodies.

Decoding is strict: a field that is unknown, unsupported, of the wrong type or out of range causes a 400 error that
names the field. Only the fields of `IGNORED` and `HINTS` are dropped, because clients send them to every model.

What the fields of tools, grammars and reasoning mean, an attachment says (`clotho.serving.chat_extension`); without it,
they are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import msgspec
from msgspec import Meta, Struct

from protocols.constraints import Grammar
from protocols.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKENS,
    PARAMETERS,
    LogitBias,
    TokenId,
    TopLogprobs,
)

MAX_MESSAGES = 2048
"""Maximum number of messages of a conversation, and of parts of one message."""

NO_SEED = -1
"""Value of `seed` that requests a random one, as in vLLM and llama.cpp."""

MAX_TOOLS = 128

Seed = Annotated[int, Meta(ge=NO_SEED, le=2**63 - 1)]
Limit = Annotated[int, Meta(ge=1)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64)]
BadWordText = Annotated[str, Meta(min_length=1, max_length=256)]

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "reasoning",  # the reasoning effort of a hosted model
})  # fmt: skip

HINTS = frozenset({"verbosity", "cache_salt", "priority", "prompt_cache_options", "prompt_cache_retention"})
"""Hints that clients of many models send with every request, and that have no effect here."""

# Unsupported field -> the values that are accepted because they request nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"), "best_of": (1,), "suffix": ("",),
    "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (),
    "chat_template": (),
}  # fmt: skip

Choices = Annotated[list[str], Meta(min_length=1, max_length=4096)]
Schema = dict[str, Any] | str
"""A JSON schema, as an object or as its text."""


class JsonSchema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema of OpenAI's `response_format`. strict: has no effect, because every schema is enforced."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class OutputFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`, and vLLM's type structural_tag.

    schema: of the objects of type json_object, as llama.cpp and Together accept it. The type structural_tag has the
    fields of `StructuralTag`, or in `format` those of `TriggeredTags`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. Exactly one field is set.

    disable_any_whitespace: false permits whitespace between the elements of JSON; it applies to json and json_object.
    """

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = True


class ConstraintFields(Struct, frozen=True, kw_only=True):
    """The fields of a request that constrain its completions; at most one is set."""

    response_format: OutputFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def json_grammar(schema: Schema, param: str, *, spaced: bool = False) -> Grammar:
    """Return the grammar of JSON texts that a schema validates. spaced: see `Grammar`."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar(kind="json_schema", text=text, param=param, spaced=spaced)


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. include_usage: send a last chunk with token counts."""

    include_usage: bool = False


SCALAR_PARAMETERS = tuple(
    name
    for name, parameter in PARAMETERS.items()
    if parameter.is_scalar and parameter.affects != "report" and name != "max_tokens"
)
"""Sampling parameters that a request sets with one field of the same name, type and range."""

if TYPE_CHECKING:

    class SamplingFields(ConstraintFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """The fields of `SCALAR_PARAMETERS`. A field that is null or absent takes the server's default."""

else:
    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [(name, Optional[PARAMETERS[name].annotation], None) for name in SCALAR_PARAMETERS],  # noqa: UP045
        bases=(ConstraintFields,),
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


class GenerationFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that all generation requests share. A field that is null or absent takes the server's default."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    logit_bias: Annotated[dict[TokenId, LogitBias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[BadWordText], Meta(max_length=MAX_BAD_WORDS // 2)] | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class OpenaiFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both OpenAI endpoints share.

    echo: repeat the prompt before the completion; in a conversation, the last message if it is the assistant's.
    prompt_logprobs: alternatives to return per prompt token. return_tokens_as_token_ids: tokens of log-probabilities
    are named `token_id:ID`. truncate_prompt_tokens: keep this number of last prompt tokens; -1: as many as fit into the
    context. request_id: name under which the request can be aborted.
    """

    echo: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    request_id: RequestId | None = None


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


class ContentPart(Struct, frozen=True, kw_only=True):
    """One part of a message. Only parts of type `text` are supported; fields of other types are not decoded."""

    type: str
    text: str | None = None


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation. `developer` is rendered as `system`; `refusal` is not rendered.

    tool_calls, reasoning_content: of the assistant; the content may then be absent. tool_call_id, name: of a tool.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
TemplateVariable = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
TemplateValue = bool | int | float | Annotated[str, Meta(max_length=256)]
TemplateVariables = Annotated[dict[TemplateVariable, TemplateValue], Meta(max_length=16)]
"""Variables of the chat template that a request sets, such as `enable_thinking`."""


class ChatRequest(OpenaiFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    separate_reasoning: bool | None = None
