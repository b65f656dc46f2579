"""POST /v1/generate/ as clients of TRL's vLLM server know it: many prompts, rows of token identifiers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from clotho.serving.native import NativeAsk, NativeFields, Outcome, Served, decode_known, served
from clotho.serving.openai_choices import LOWEST, finish_reason
from clotho.serving.openai_requests import json_object
from clotho.serving.sample_requests import build_ask, check_model, encoded
from clotho.serving.services import GatewayServices
from protocols.sampling import TokenId


class TrlRequest(NativeFields, frozen=True, kw_only=True):
    """The body. prompts: texts, or lists of token identifiers."""

    prompts: Annotated[list[str | list[TokenId]], Meta(min_length=1)]


class TrlAnswer(Served, frozen=True, kw_only=True):
    """Row `i * n + j` is completion j of prompt i; logprobs are those of its tokens."""

    prompt_ids: list[tuple[int, ...]]
    completion_ids: list[tuple[int, ...]]
    logprobs: list[list[float]]
    finish_reasons: list[str]


def trl_ask(body: bytes, services: GatewayServices) -> NativeAsk:
    """Read the body; raises ApiError."""
    asked, ignored = decode_known(json_object(body), TrlRequest)
    check_model(asked.model, services)
    prompts = [encoded(prompt, services, param="prompts") for prompt in asked.prompts]
    ask = build_ask(asked, prompts, "prompts", asked.max_tokens, None, services, fit_context=True)

    def answer(outcome: Outcome) -> TrlAnswer:
        return TrlAnswer(
            **served(outcome.completions, outcome, ignored, services),
            prompt_ids=prompts,
            completion_ids=[one.tokens for one in outcome.completions],
            logprobs=[[max(value, LOWEST) for value in one.logprobs] for one in outcome.completions],
            finish_reasons=[finish_reason(one) for one in outcome.completions],
        )

    return NativeAsk(ask=ask, answer=answer)
