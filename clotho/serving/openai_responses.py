"""Response bodies of the OpenAI API, whole or streamed, with the policy versions that sampled each choice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from clotho.serving.chat_extension import CallDelta, MessageParser
from clotho.serving.errors import ApiError
from clotho.serving.openai_requests import ValidatedRequest
from clotho.serving.services import ServerContext, Tokenizer
from protocols.sampling import Completion
from protocols.step import WeightsReady

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
    tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Alternatives], tokenizer: Tokenizer, *, offset: int
) -> CompletionLogprobs:
    """Return parallel lists; `top_logprobs` always includes the sampled token."""
    texts = [tokenizer.token_text(token) for token in tokens]
    finite = [max(value, LOWEST) for value in logprobs]
    offsets = [offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=finite,
        top_logprobs=[
            {tokenizer.token_text(other): max(value, LOWEST) for other, value in _alternatives(top, index)}
            | {text: own}
            for index, (text, own) in enumerate(zip(texts, finite, strict=True))
        ],
        text_offset=offsets[:-1],
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


class ResponseFormat(Protocol):
    """The format of one endpoint's responses.

    id_prefix: prefix of response IDs. whole, streamed: value of the field `object`.
    """

    id_prefix: str
    whole: str
    streamed: str

    def choice(self, chunk: Chunk, request: ValidatedRequest, tokenizer: Tokenizer, *, whole: bool) -> Choice:
        """Return the choice of a whole response or of a stream."""
        ...

    def prompt_token_ids(self, request: ValidatedRequest) -> TokenIds:
        """Return the top-level `prompt_token_ids` of a whole response or of the first streamed chunk."""
        ...


class CompletionFormat:
    """Format of /v1/completions. `prompt_token_ids` is a field of each choice."""

    id_prefix, whole, streamed = "cmpl", "text_completion", "text_completion"

    def choice(self, chunk: Chunk, request: ValidatedRequest, tokenizer: Tokenizer, *, whole: bool) -> CompletionChoice:
        """Return the choice; whole and streamed choices have the same format."""
        logprobs = None
        if request.top_logprobs is not None:
            logprobs = completion_logprobs(
                chunk.tokens, chunk.logprobs, chunk.top_logprobs, tokenizer, offset=chunk.offset
            )
        return CompletionChoice(
            index=chunk.index,
            text=chunk.text,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            weights_versions=weights_versions(chunk.versions),
            token_ids=chunk.tokens if request.return_token_ids else UNSET,
            prompt_token_ids=self._prompt_of(chunk, request) if request.return_token_ids and chunk.first else UNSET,
        )

    def prompt_token_ids(self, request: ValidatedRequest) -> TokenIds:
        """Return UNSET."""
        return UNSET

    def _prompt_of(self, chunk: Chunk, request: ValidatedRequest) -> tuple[int, ...]:
        return request.prompts[chunk.index // request.n]


class ChatFormat:
    """Format of /v1/chat/completions, for one request."""

    id_prefix, whole, streamed = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self) -> None:
        self._parsers: dict[int, MessageParser] = {}

    def choice(self, chunk: Chunk, request: ValidatedRequest, tokenizer: Tokenizer, *, whole: bool) -> ChatChoice:
        """Return the choice; the first chunk of a choice contains the role."""
        message = AssistantMessage(
            role="assistant" if chunk.first else UNSET, content=chunk.text if chunk.text or chunk.first else UNSET
        )
        finish_reason = chunk.finish_reason
        if request.message_parser is not None:
            parser = self._parsers.setdefault(chunk.index, request.message_parser())
            message = _parsed_message(chunk, parser, whole=whole)
            finish_reason = "tool_calls" if finish_reason == "stop" and parser.has_calls else finish_reason
        logprobs = None
        if request.top_logprobs is not None:
            logprobs = chat_logprobs(chunk.tokens, chunk.logprobs, chunk.top_logprobs, tokenizer)
        return ChatChoice(
            index=chunk.index,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=chunk.stop_reason,
            weights_versions=weights_versions(chunk.versions),
            message=message if whole else UNSET,
            delta=UNSET if whole else message,
            token_ids=chunk.tokens if request.return_token_ids else UNSET,
        )

    def prompt_token_ids(self, request: ValidatedRequest) -> TokenIds:
        """Return the token IDs of the prompt if the request has `return_token_ids`."""
        return request.prompts[0] if request.return_token_ids else UNSET


def _parsed_message(chunk: Chunk, parser: MessageParser, *, whole: bool) -> AssistantMessage:
    """Return the parts of a message that are final with a chunk."""
    delta = parser.push(chunk.text, last=chunk.finish_reason is not None)
    content: str | UnsetType | None = delta.content or ("" if chunk.first else UNSET)
    if whole and not delta.content and (delta.calls or delta.reasoning):
        content = None
    return AssistantMessage(
        role="assistant" if chunk.first else UNSET,
        content=content,
        reasoning_content=delta.reasoning or UNSET,
        tool_calls=call_deltas(delta.calls, whole=whole) if delta.calls else UNSET,
    )


def _is_empty(choice: Choice) -> bool:
    """Whether a streamed choice contains nothing, because the parser of the message holds its text back."""
    is_open = choice.finish_reason is None and choice.logprobs is None and not choice.token_ids
    return is_open and isinstance(choice, ChatChoice) and choice.delta == AssistantMessage()


def whole_chunk(completion: Completion, index: int) -> Chunk:
    """Return a finished completion as one chunk."""
    return Chunk(
        index=index,
        text=completion.text,
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        top_logprobs=completion.top_logprobs,
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


class ResponseBuilder:
    """Builds the body of one response, or of all chunks of one stream, which share ID, time and model name."""

    def __init__(
        self,
        response_format: ResponseFormat,
        request: ValidatedRequest,
        context: ServerContext,
        weights: WeightsReady,
    ) -> None:
        """weights: version of the request's model when the request arrived."""
        self.request = request
        names = TokenIdTexts(context.tokenizer) if request.return_tokens_as_token_ids else context.tokenizer
        self.tokenizer: Tokenizer = names
        self._format, self._weights = response_format, weights
        self._model = request.model.id
        self._id = f"{response_format.id_prefix}-{request.request_id}"
        self._created = int(time.time())

    def whole(self, results: Sequence[Sequence[Completion]]) -> ResponseBody:
        """Return the whole response; choice `i * n + j` is completion j of prompt i."""
        chunks = [whole_chunk(completion, index) for index, completion in enumerate(chain.from_iterable(results))]
        choices = [self._choice(chunk, whole=True) for chunk in chunks]
        prompt = self._format.prompt_token_ids(self.request)
        return self._body(self._format.whole, choices, prompt, self._usage(sum(len(chunk.tokens) for chunk in chunks)))

    def streamed(self, chunk: Chunk, *, opening: bool) -> bytes:
        """Return the event of one chunk; the `opening` event of a stream contains `prompt_token_ids`.

        Returns nothing if the chunk contains nothing that is final.
        """
        choice = self._choice(chunk, whole=False)
        if self.request.message_parser is not None and _is_empty(choice):
            return b""
        prompt = self._format.prompt_token_ids(self.request) if opening else UNSET
        usage = None if self.request.include_usage else UNSET
        return server_sent(self._body(self._format.streamed, [choice], prompt, usage))

    def ending(self, completions: Sequence[Completion]) -> bytes:
        """Return the end of a stream, with `include_usage` behind a last chunk without choices."""
        if not self.request.include_usage:
            return DONE
        usage = self._usage(sum(len(completion.tokens) for completion in completions))
        return server_sent(self._body(self._format.streamed, [], UNSET, usage)) + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed: the error as an event of its own."""
        return server_sent(error.body) + DONE

    def _choice(self, chunk: Chunk, *, whole: bool) -> Choice:
        return self._format.choice(chunk, self.request, self.tokenizer, whole=whole)

    def _body(
        self, name: str, choices: Sequence[Choice], prompt: TokenIds, usage: Usage | UnsetType | None
    ) -> ResponseBody:
        return ResponseBody(
            id=self._id,
            object=name,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._weights.fingerprint,
            weights_version=self._weights.version,
            usage=usage,
            prompt_token_ids=prompt,
        )

    def _usage(self, completion_tokens: int) -> Usage:
        prompt = self.request.prompt_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=completion_tokens, total_tokens=prompt + completion_tokens)
