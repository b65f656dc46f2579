"""POST /generate as vLLM clients know it: one prompt, `n` completions, parallel lists in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from clotho.serving.native import NativeAsk, NativeFields, Outcome, Served, decode_known, served
from clotho.serving.openai_choices import LOWEST, Alternatives, finish_reason
from clotho.serving.sample_requests import build_ask, check_model, encoded
from clotho.serving.services import GatewayServices
from protocols.sampling import Completion, TokenId, TopLogprobs

Position = dict[int, float]
"""Token -> log-probability: first the token that stands there, then the most probable others, best first."""


class TokensPrompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt that is tokenised already; `prompt`, its text, is not read."""

    prompt_token_ids: list[TokenId]
    prompt: str | None = None


class VllmRequest(NativeFields, frozen=True, kw_only=True):
    """The body. logprobs, prompt_logprobs: alternatives beside each token of the completion, of the prompt."""

    prompt: str | TokensPrompt
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None


class VllmAnswer(Served, frozen=True, kw_only=True):
    """The answer; everything but the prompt is a list of `n`.

    prompt: its text, where text was given. prompt_logprobs: null for the first token, before which there is nothing;
    prompt_weights_version: the weights that computed them.
    """

    text: list[str]
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: list[tuple[int, ...]]
    logprobs: list[list[tuple[Position]]] | None
    finish_reasons: list[str]
    stop_reasons: list[str | int | None]
    prompt_logprobs: list[Position | None] | None
    prompt_weights_version: int | UnsetType = UNSET


def vllm_ask(fields: dict[str, Any], services: GatewayServices) -> NativeAsk:
    """Read the body; raises ApiError."""
    asked, ignored = decode_known(fields, VllmRequest)
    check_model(asked.model, services)
    text = asked.prompt if isinstance(asked.prompt, str) else None
    tokens = encoded(asked.prompt if isinstance(asked.prompt, str) else asked.prompt.prompt_token_ids, services)
    ask = build_ask(asked, [tokens], "prompt", asked.max_tokens, asked.logprobs, services, fit_context=True)

    def answer(outcome: Outcome) -> VllmAnswer:
        return VllmAnswer(
            **served(outcome.completions, outcome, ignored, services),
            text=[one.text for one in outcome.completions],
            prompt=text,
            prompt_token_ids=tokens,
            token_ids=[one.tokens for one in outcome.completions],
            logprobs=None if asked.logprobs is None else [_positions(one) for one in outcome.completions],
            finish_reasons=[finish_reason(one) for one in outcome.completions],
            stop_reasons=[one.stop_reason for one in outcome.completions],
            prompt_logprobs=_prompt_positions(tokens, outcome),
            prompt_weights_version=outcome.prompt.version if outcome.prompt else UNSET,
        )

    return NativeAsk(ask=ask, answer=answer, prompt_logprobs=asked.prompt_logprobs)


def _positions(completion: Completion) -> list[tuple[Position]]:
    return [(position,) for position in _told(completion.tokens, completion.logprobs, completion.top_logprobs)]


def _prompt_positions(tokens: Sequence[int], outcome: Outcome) -> list[Position | None] | None:
    if outcome.prompt is None:
        return None
    return [None, *_told(tokens[1:], outcome.prompt.logprobs, outcome.prompt.top_logprobs)]


def _told(tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Alternatives]) -> list[Position]:
    told = [{token: max(logprob, LOWEST)} for token, logprob in zip(tokens, logprobs, strict=True)]
    for position, others in zip(told, top, strict=False):  # without alternatives there is no place for them
        for token, logprob in others:
            position.setdefault(token, max(logprob, LOWEST))
    return told
