"""POST /generate as SGLang clients know it: one prompt, one object per completion.

POST /generate: one path for two shapes, told apart by the names of their fields.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType, structs

from clotho.serving.errors import invalid
from clotho.serving.native import NativeAsk, NativeFields, Outcome, Served, decode_known, served
from clotho.serving.openai_choices import LOWEST, Alternatives, finish_reason
from clotho.serving.openai_requests import Limit, Seed, json_object
from clotho.serving.routes_vllm import vllm_ask
from clotho.serving.sample_requests import build_ask, check_model, encoded
from clotho.serving.services import GatewayServices, Tokens
from protocols.sampling import Completion, TokenId, TopLogprobs

TokenEntry = tuple[float, int, str | None]
"""Log-probability, token, and its text where that was asked for."""


class SglangParams(NativeFields, frozen=True, kw_only=True):
    """`sampling_params`; max_new_tokens goes before its other names."""

    max_new_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    sampling_seed: Seed | None = None


class SglangRequest(Struct, frozen=True, kw_only=True):
    """The body: `text` or `input_ids`, one of the two."""

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: TopLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    model: str | None = None
    rid: str | None = None


class FinishReason(Struct, frozen=True, kw_only=True):
    """Why it ended: `matched` what stopped it, or `length` after so many tokens."""

    type: str
    matched: str | int | UnsetType = UNSET
    length: int | UnsetType = UNSET


class MetaInfo(Served, frozen=True, kw_only=True):
    """What SGLang tells beside the text; `weight_version` is its own name for the weights' version, a string."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    weight_version: str
    output_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenEntry]] | UnsetType = UNSET


class SglangAnswer(Struct, frozen=True, kw_only=True):
    """One completion."""

    text: str
    output_ids: tuple[int, ...]
    meta_info: MetaInfo


def sglang_ask(fields: dict[str, Any], services: GatewayServices) -> NativeAsk:
    """Read the body; raises ApiError."""
    asked, ignored = decode_known(fields, SglangRequest)
    params, ignored_params = decode_known(asked.sampling_params or {}, SglangParams)
    for model in (asked.model, params.model):
        check_model(model, services)
    if (asked.text is None) == (asked.input_ids is None):
        raise invalid("input_ids", "give either input_ids or text")
    param = "text" if asked.input_ids is None else "input_ids"
    tokens = encoded(asked.text or "" if asked.input_ids is None else asked.input_ids, services, param=param)
    if params.sampling_seed is not None:
        params = structs.replace(params, seed=params.sampling_seed)
    limit = params.max_new_tokens or params.max_completion_tokens or params.max_tokens
    top = (asked.top_logprobs_num or 0) if asked.return_logprob else None
    ask = build_ask(params, [tokens], param, limit, top, services, fit_context=True)
    all_ignored = (*ignored, *(f"sampling_params.{name}" for name in ignored_params))
    request_id = asked.rid[:64] if asked.rid else secrets.token_hex(16)

    def one(index: int, completion: Completion, outcome: Outcome) -> SglangAnswer:
        meta = MetaInfo(
            **served([completion], outcome, all_ignored, services),
            id=request_id if ask.n == 1 else f"{request_id}-{index}",
            finish_reason=_finish(completion),
            prompt_tokens=len(tokens),
            completion_tokens=len(completion.tokens),
            weight_version=str(outcome.weights.version),
            **_logprobs(completion, ask.top_logprobs, services.tokenizer if asked.return_text_in_logprobs else None),
        )
        return SglangAnswer(text=completion.text, output_ids=completion.tokens, meta_info=meta)

    def answer(outcome: Outcome) -> Struct | list[Struct]:
        answers: list[Struct] = [one(index, each, outcome) for index, each in enumerate(outcome.completions)]
        return answers if ask.n > 1 else answers[0]

    return NativeAsk(ask=ask, answer=answer)


def _finish(completion: Completion) -> FinishReason:
    reason = finish_reason(completion)
    if reason == "length":
        return FinishReason(type=reason, length=len(completion.tokens))
    return FinishReason(type=reason, matched=UNSET if completion.stop_reason is None else completion.stop_reason)


def _logprobs(completion: Completion, top: int | None, texts: Tokens | None) -> dict[str, Any]:
    if top is None:
        return {}
    entries = _entries(list(zip(completion.tokens, completion.logprobs, strict=True)), texts)
    others = [_entries(alternatives, texts) for alternatives in completion.top_logprobs] if top else UNSET
    return {"output_token_logprobs": entries, "output_top_logprobs": others}


def _entries(pairs: Sequence[tuple[int, float]] | Alternatives, texts: Tokens | None) -> list[TokenEntry]:
    return [(max(logprob, LOWEST), token, texts.token_text(token) if texts else None) for token, logprob in pairs]


SGLANG = frozenset({"input_ids", "text", "sampling_params"})


def generate_ask(body: bytes, services: GatewayServices) -> NativeAsk:
    """Read the body as vLLM's (`prompt`) or SGLang's (`input_ids` or `text`, `sampling_params`); raises ApiError."""
    fields = json_object(body)
    given = {name for name, value in fields.items() if value is not None}
    ours = sorted(given & SGLANG)
    if ours and "prompt" in given:
        raise invalid("prompt", f"is a field of vLLM, {ours[0]} one of SGLang: give one or the other")
    if ours:
        return sglang_ask(fields, services)
    if "prompt" not in given:
        raise invalid("prompt", "is missing: give prompt (vLLM), or input_ids or text (SGLang)")
    return vllm_ask(fields, services)
