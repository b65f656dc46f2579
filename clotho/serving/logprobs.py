"""Log-probabilities in both shapes of the OpenAI API: natural logs, of the distribution that was drawn from."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from clotho.serving.services import Tokens

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
