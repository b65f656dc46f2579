"""What clients may ask: bodies of /v1/completions and /v1/chat/completions, decoded strictly.

A field that is unknown, unsupported, ill-typed or out of range is refused by name; nothing is dropped in silence but
the fields of `IGNORED`, which by their meaning cannot change a completion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

import msgspec
from msgspec import Meta, Struct

from clotho.serving.errors import ApiError, invalid
from protocols.sampling import PARAMETERS, LogitBias, TokenId, TopLogprobs

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Limit = Annotated[int, Meta(ge=1)]

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
    "reasoning",  # how much a provider's model is to think: this one thinks as it has learned to, in its text
})  # fmt: skip

# Field -> the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "presence_penalty": (0,), "frequency_penalty": (0,),
    "best_of": (1,), "echo": (False,), "suffix": ("",), "min_tokens": (0,), "prompt_logprobs": (),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": ("none",), "web_search_options": (),
    "skip_special_tokens": (True,), "include_stop_str_in_output": (False,), "return_tokens_as_token_ids": (False,),
    "continue_final_message": (False,), "chat_template": (), "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (), "allowed_token_ids": (), "bad_words": ([],), "structured_outputs": (),
}  # fmt: skip


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to stream. include_usage: a last chunk that counts tokens."""

    include_usage: bool = False


SCALAR_PARAMETERS = tuple(
    name
    for name, parameter in PARAMETERS.items()
    if parameter.is_scalar and parameter.affects != "report" and name != "max_tokens"
)
"""Sampling parameters that requests state as one field of the same name, type and range."""

if TYPE_CHECKING:

    class SamplingFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """The fields of `SCALAR_PARAMETERS`; null means the server's default."""

else:
    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [(name, Optional[PARAMETERS[name].annotation], None) for name in SCALAR_PARAMETERS],  # noqa: UP045
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


class GenerationFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both kinds of request share; null means the server's default."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    logit_bias: dict[TokenId, LogitBias] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: text, token identifiers, or a list of either."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: TopLogprobs | None = None


class ContentPart(Struct, frozen=True, kw_only=True):
    """A part of a message; only text is supported. Other kinds keep their own fields, which are never read."""

    type: str
    text: str | None = None


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation; `developer` is rendered as `system`, `name` and `refusal` are not rendered."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None
    refusal: str | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None


R = TypeVar("R", bound=GenerationFields)


def decode(body: bytes, kind: type[R]) -> R:
    """Decode a body; raises ApiError(400) that names the field at fault."""
    fields = without_unsupported(json_object(body), UNSUPPORTED)
    wanted = {name: value for name, value in fields.items() if name not in IGNORED}
    try:
        return msgspec.convert(wanted, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise refused(error) from error


def without_unsupported(fields: dict[str, Any], unsupported: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
    """Return the other fields; raises ApiError(400) where an unsupported one asks for something."""
    for name, harmless in unsupported.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise invalid(name, "not supported by this server")
    return {name: value for name, value in fields.items() if name not in unsupported}


def refused(error: msgspec.ValidationError) -> ApiError:
    """Return the 400 for a value of the wrong type or out of range, by the name of its field."""
    message, _, path = str(error).partition(" - at ")
    found = re.search(r"(?<=\$\.)\w+", path) or re.search(r"(?<=field `)\w+", message)
    param = found.group() if found else None
    return ApiError(400, f"{param}: {message}" if path and param else message, param=param)


def json_object(body: bytes) -> dict[str, Any]:
    """Decode strict JSON; raises ApiError(400) for whatever is not an object, or names a field twice."""
    try:
        value = msgspec.json.decode(body)
        json.loads(body, object_pairs_hook=_no_duplicates)
    except RecursionError as error:
        raise ApiError(400, "the body is not usable JSON: nested too deeply") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, f"the body names {twice[:64]!r} twice", param=twice[:64])
