"""Response bodies of the OpenAI API, whole or streamed, with the policy versions that sampled each choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from clotho.serving.chat_extension import CallDelta
from clotho.serving.services import Tokenizer
from protocols.sampling import Completion, PromptLogprobs

Alternatives = tuple[tuple[int, float], ...]
LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent. OpenAI uses the same value."""

DONE = b"data: [DONE]\n\n"
"""The end of a stream of chunks, also after an error."""


def server_sent(body: Struct, name: str = "") -> bytes:
    """Encode one server-sent event. name: type of the event, if it has one."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


class TokenAlternative(Struct, frozen=True, kw_only=True):
    """One token. bytes: UTF-8 encoding of the token; null if the token is an incomplete character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TokenAlternative, frozen=True, kw_only=True):
    """One token of the completion, with the most probable tokens at its position."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities in the format of /v1/chat/completions: natural log, under the sampling distribution."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities in the format of /v1/completions: natural log, under the sampling distribution, parallel lists.

    text_offset: number of characters of token text before each token. The first token of an echoed prompt has no
    log-probability, because it has no context.
    """

    tokens: list[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(
    tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Alternatives], tokenizer: Tokenizer
) -> ChatLogprobs:
    """Return one entry per token; `top` may be empty."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=(entry := _alternative(token, logprob, tokenizer)).token,
                logprob=entry.logprob,
                bytes=entry.bytes,
                top_logprobs=[_alternative(other, value, tokenizer) for other, value in _alternatives(top, index)],
            )
            for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
        ]
    )


def completion_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[Alternatives],
    tokenizer: Tokenizer,
    *,
    offset: int,
) -> CompletionLogprobs:
    """Return parallel lists; `top_logprobs` always includes the token itself."""
    texts = [tokenizer.token_text(token) for token in tokens]
    finite = [None if value is None else max(value, LOWEST) for value in logprobs]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=finite,
        top_logprobs=[
            None
            if own is None
            else {tokenizer.token_text(other): max(value, LOWEST) for other, value in _alternatives(top, index)}
            | {text: own}
            for index, (text, own) in enumerate(zip(texts, finite, strict=True))
        ],
        text_offset=list(accumulate(map(len, texts), initial=offset))[:-1],
    )


def _alternatives(top: Sequence[Alternatives], index: int) -> Alternatives:
    return top[index] if top else ()


def _alternative(token: int, logprob: float, tokenizer: Tokenizer) -> TokenAlternative:
    text = tokenizer.token_text(token)
    encoded = None if "\ufffd" in text else list(text.encode())
    return TokenAlternative(token=text, logprob=max(logprob, LOWEST), bytes=encoded)


class TokenIdTexts:
    """The names `token_id:ID` in place of the texts of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def token_text(self, token: int, /) -> str:
        """Return the name of a token."""
        return f"token_id:{token}"


class PromptToken(Struct, frozen=True, kw_only=True):
    """One token at a position of a prompt, in the format of vLLM. rank: 1 is the most probable; null if unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptPosition = dict[int, PromptToken]
"""Token -> log-probability at one position: the token of the prompt first, then the alternatives."""

PromptPositions = list[PromptPosition | None] | UnsetType
TokenIds = tuple[int, ...] | UnsetType


def prompt_positions(
    tokens: Sequence[int], scored: PromptLogprobs, tokenizer: Tokenizer, *, top: int
) -> list[PromptPosition | None]:
    """Return one entry per token of a prompt, with `top` alternatives; null for the first, which has no context."""
    positions: list[PromptPosition | None] = [None]
    for token, logprob, alternatives in zip(tokens[1:], scored.logprobs, scored.top_logprobs, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(alternatives[:top], 1)}
        values = {token: logprob} | {other: value for other, value in alternatives[:top] if other != token}
        positions.append(
            {
                other: PromptToken(
                    logprob=max(value, LOWEST), rank=ranks.get(other), decoded_token=tokenizer.token_text(other)
                )
                for other, value in values.items()
            }
        )
    return positions


class Chunk(Struct, frozen=True, kw_only=True):
    """A whole completion, or its new part since the previous chunk.

    offset: characters of token text in earlier chunks. first: no earlier chunk. finish_reason: set in the last chunk.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    top_logprobs: tuple[Alternatives, ...] = ()
    offset: int = 0
    first: bool = True
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class WeightsVersions(Struct, frozen=True, kw_only=True):
    """Policy versions that sampled the first and the last token of a completion."""

    first: int
    last: int


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """A choice of /v1/completions, whole or streamed."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    weights_versions: WeightsVersions | None
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptPositions = UNSET


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


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """A message, or its new part in a stream."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """A choice of /v1/chat/completions: `message` in a whole response, `delta` in a stream."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    weights_versions: WeightsVersions | None
    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    token_ids: TokenIds = UNSET


Choice = CompletionChoice | ChatChoice


def last_chunk(completion: Completion, index: int, text: str, *, sent: int = 0) -> Chunk:
    """Return what is new of a finished completion. text: behind earlier chunks. sent: number of their tokens."""
    return Chunk(
        index=index,
        text=text,
        tokens=completion.tokens[sent:],
        logprobs=completion.logprobs[sent:],
        versions=completion.versions,
        top_logprobs=completion.top_logprobs[sent:],
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def weights_versions(versions: Sequence[int]) -> WeightsVersions | None:
    """Return the first and the last policy version of a completion; None if the completion has no tokens."""
    return WeightsVersions(first=versions[0], last=versions[-1]) if versions else None


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts of a request; each prompt counts once, independent of its number of completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ResponseBody(Struct, frozen=True, kw_only=True):
    """The body of a whole response, or of one streamed chunk.

    weights_version, system_fingerprint: of the policy when the request arrived. The field `weights_versions` of each
    choice contains the policy versions that sampled it.
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    system_fingerprint: str
    weights_version: int
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptPositions = UNSET


class ChatResponse(ResponseBody, frozen=True, kw_only=True):
    """The body of a response of /v1/chat/completions, or of one streamed chunk."""

    choices: Sequence[ChatChoice]


class CompletionResponse(ResponseBody, frozen=True, kw_only=True):
    """The body of a response of /v1/completions, or of one streamed chunk."""

    choices: Sequence[CompletionChoice]


class ModelCard(Struct, frozen=True, kw_only=True):
    """One model as an entry of /v1/models. parent: id of the base model; null for a base model."""

    id: str
    created: int
    max_model_len: int
    root: str
    weights_version: int
    object: str = "model"
    owned_by: str = "clotho"
    parent: str | None = None


class ModelList(Struct, frozen=True, kw_only=True):
    """The body of the response of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"
