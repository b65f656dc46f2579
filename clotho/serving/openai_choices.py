"""One completion in the shape of each route, whole or in chunks.

Log-probabilities in both shapes of the OpenAI API: natural logs, of the distribution that was sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import UNSET, Struct, UnsetType

from clotho.serving.sample_requests import Ask
from clotho.serving.services import Tokens
from protocols.errors import GenerationError
from protocols.sampling import Completion

Alternatives = tuple[tuple[int, float], ...]
LOWEST = -9999.0
"""Stands for minus infinity, which JSON has not; OpenAI's own convention."""


class TokenAlternative(Struct, frozen=True, kw_only=True):
    """One token; `bytes` is its UTF-8 form, null where it is only part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TokenAlternative, frozen=True, kw_only=True):
    """One token of the completion, and the most probable ones in its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """The shape of /v1/chat/completions."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """The shape of /v1/completions: parallel lists. text_offset: characters of token text before each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(
    tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Alternatives], tokenizer: Tokens
) -> ChatLogprobs:
    """Return one entry per token; `top` may be empty."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=(one := _alternative(token, logprob, tokenizer)).token,
                logprob=one.logprob,
                bytes=one.bytes,
                top_logprobs=[_alternative(other, value, tokenizer) for other, value in _at(top, index)],
            )
            for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
        ]
    )


def completion_logprobs(
    tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Alternatives], tokenizer: Tokens, *, offset: int
) -> CompletionLogprobs:
    """Return parallel lists; each token's own entry is always among its `top_logprobs`."""
    texts = [tokenizer.token_text(token) for token in tokens]
    finite = [max(value, LOWEST) for value in logprobs]
    offsets = [offset]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=finite,
        top_logprobs=[
            {tokenizer.token_text(other): max(value, LOWEST) for other, value in _at(top, index)} | {text: own}
            for index, (text, own) in enumerate(zip(texts, finite, strict=True))
        ],
        text_offset=offsets[:-1],
    )


def _at(top: Sequence[Alternatives], index: int) -> Alternatives:
    return top[index] if top else ()


def _alternative(token: int, logprob: float, tokenizer: Tokens) -> TokenAlternative:
    text = tokenizer.token_text(token)
    encoded = None if "\ufffd" in text else list(text.encode())
    return TokenAlternative(token=text, logprob=max(logprob, LOWEST), bytes=encoded)


TokenIds = tuple[int, ...] | UnsetType


class Piece(Struct, frozen=True, kw_only=True):
    """A completion, or what is new of it since the piece before.

    offset: characters of token text that came before. first: nothing came before. finish_reason: of the last piece.
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
    """The weights that drew the first and the last token."""

    first: int
    last: int


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """A choice of /v1/completions; its chunks look the same."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    weights_versions: WeightsVersions | None
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class AssistantMessage(Struct, frozen=True, kw_only=True):
    """A message, or what is new of one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """A choice of /v1/chat/completions: `message` of a whole answer, `delta` of a chunk."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    weights_versions: WeightsVersions | None
    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    token_ids: TokenIds = UNSET


Choice = CompletionChoice | ChatChoice


class Style(Protocol):
    """How one route dresses completions. prefix: of identifiers; whole, chunk: names of its objects."""

    prefix: str
    whole: str
    chunk: str

    def choice(self, piece: Piece, ask: Ask, tokenizer: Tokens, *, whole: bool) -> Choice:
        """Return the choice of a whole answer, or of a chunk."""
        ...

    def prompt_token_ids(self, ask: Ask) -> TokenIds:
        """Return what stands at the top of an answer, or of the first chunk."""
        ...


class CompletionStyle:
    """/v1/completions. The prompt's tokens are told per choice."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, piece: Piece, ask: Ask, tokenizer: Tokens, *, whole: bool) -> CompletionChoice:
        """Return the choice; a chunk looks like the whole."""
        logprobs = None
        if ask.top_logprobs is not None:
            logprobs = completion_logprobs(
                piece.tokens, piece.logprobs, piece.top_logprobs, tokenizer, offset=piece.offset
            )
        told = ask.return_token_ids
        return CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            weights_versions=weights_versions(piece.versions),
            token_ids=piece.tokens if told else UNSET,
            prompt_token_ids=ask.requests[piece.index // ask.n].prompt if told and piece.first else UNSET,
        )

    def prompt_token_ids(self, ask: Ask) -> TokenIds:
        """Return nothing."""
        return UNSET


class ChatStyle:
    """/v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, piece: Piece, ask: Ask, tokenizer: Tokens, *, whole: bool) -> ChatChoice:
        """Return the choice; the first chunk of an index names the role."""
        said = AssistantMessage(
            role="assistant" if piece.first else UNSET, content=piece.text if piece.text or piece.first else UNSET
        )
        logprobs = None
        if ask.top_logprobs is not None:
            logprobs = chat_logprobs(piece.tokens, piece.logprobs, piece.top_logprobs, tokenizer)
        return ChatChoice(
            index=piece.index,
            logprobs=logprobs,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            weights_versions=weights_versions(piece.versions),
            message=said if whole else UNSET,
            delta=UNSET if whole else said,
            token_ids=piece.tokens if ask.return_token_ids else UNSET,
        )

    def prompt_token_ids(self, ask: Ask) -> TokenIds:
        """Return the tokens of the one prompt, if asked for."""
        return ask.requests[0].prompt if ask.return_token_ids else UNSET


def whole_piece(completion: Completion, index: int) -> Piece:
    """Return a finished completion as one piece."""
    return Piece(
        index=index,
        text=completion.text,
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        top_logprobs=completion.top_logprobs,
        finish_reason=finish_reason(completion),
        stop_reason=completion.stop_reason,
    )


def finish_reason(completion: Completion) -> str:
    """Return why it ended; raises GenerationError for one that was aborted, which clients know no word for."""
    if completion.finish_reason == "abort":
        raise GenerationError("it was aborted")
    return completion.finish_reason


def weights_versions(versions: Sequence[int]) -> WeightsVersions | None:
    """Return the first and the last of the versions that drew a completion's tokens; None if there are none."""
    return WeightsVersions(first=versions[0], last=versions[-1]) if versions else None
