"""POST /generate in the formats of vLLM and SGLang, and POST /v1/generate in that of TRL's vLLM server.

vLLM: one prompt with `n` completions; the response contains parallel lists. SGLang: one prompt; the response contains
one object per completion. The names of the request fields select the format. TRL: many prompts, one row of token IDs
per completion.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from attachments.dialects.native import (
    GenerationResult,
    NativeFields,
    NativeRequest,
    ServedBy,
    decode_known,
    served_by,
)
from clotho.serving.bodies import json_object
from clotho.serving.errors import invalid_field
from clotho.serving.openai_fields import Limit, Schema, Seed, json_grammar
from clotho.serving.openai_requests import build_request, check_choices, tokenize
from clotho.serving.openai_responses import LOWEST, Alternatives
from clotho.serving.services import ServerContext, Tokenizer, find_served
from protocols.constraints import Grammar
from protocols.sampling import Completion, TokenId, TopLogprobs

Position = dict[int, float]
"""Token -> log-probability at one position: the sampled token first, then the alternatives, most probable first."""

TokenEntry = tuple[float, int, str | None]
"""Log-probability, token, and the token's text if the request has `return_text_in_logprobs`."""

SGLANG_FIELDS = frozenset({"input_ids", "text", "sampling_params"})


def parse_generate_request(body: bytes, context: ServerContext) -> NativeRequest:
    """Parse the body of /generate as vLLM's (`prompt`) or SGLang's (`text`, `input_ids`). Raises ApiError."""
    fields = json_object(body)
    given = {name for name, value in fields.items() if value is not None}
    sglang_fields = sorted(given & SGLANG_FIELDS)
    if sglang_fields and "prompt" in given:
        other = sglang_fields[0]
        raise invalid_field("prompt", f"belongs to vLLM's format and {other} to SGLang's; use the fields of one format")
    if sglang_fields:
        return parse_sglang_request(fields, context)
    if "prompt" not in given:
        raise invalid_field("prompt", "is missing; set prompt (vLLM), or input_ids or text (SGLang)")
    return parse_vllm_request(fields, context)


class TokensPrompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tokenized prompt; its text in `prompt` is not used."""

    prompt_token_ids: list[TokenId]
    prompt: str | None = None


class VllmRequest(NativeFields, frozen=True, kw_only=True):
    """The request body. logprobs, prompt_logprobs: alternatives to return per completion token and per prompt token."""

    prompt: str | TokensPrompt
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None


class VllmResponse(ServedBy, frozen=True, kw_only=True):
    """The response body; every field but those of the prompt is a list of `n`.

    prompt: null if the request contains token IDs. prompt_logprobs: null at the first token, which has no context.
    prompt_weights_version: policy version that computed `prompt_logprobs`.
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


def parse_vllm_request(body_fields: dict[str, Any], context: ServerContext) -> NativeRequest:
    """Parse a request in vLLM's format. Raises ApiError."""
    fields, ignored = decode_known(body_fields, VllmRequest)
    model = find_served(fields.model, context)
    check_choices(fields.n, 1, "prompt", context)
    text = fields.prompt if isinstance(fields.prompt, str) else None
    tokens = tokenize(fields.prompt if isinstance(fields.prompt, str) else fields.prompt.prompt_token_ids, context)
    request = build_request(
        fields, [tokens], "prompt", fields.max_tokens, fields.logprobs, context, model=model, fit_context=True
    )

    def respond(result: GenerationResult) -> VllmResponse:
        """Build the response of vLLM."""
        return VllmResponse(
            **served_by(result.completions, result, ignored),
            text=[completion.text for completion in result.completions],
            prompt=text,
            prompt_token_ids=tokens,
            token_ids=[completion.tokens for completion in result.completions],
            logprobs=None if fields.logprobs is None else [_completion_positions(one) for one in result.completions],
            finish_reasons=[completion.finish_reason for completion in result.completions],
            stop_reasons=[completion.stop_reason for completion in result.completions],
            prompt_logprobs=_prompt_positions(tokens, result),
            prompt_weights_version=result.prompt.version if result.prompt else UNSET,
        )

    return NativeRequest(request=request, respond=respond, prompt_logprobs=fields.prompt_logprobs)


def _completion_positions(completion: Completion) -> list[tuple[Position]]:
    return [(position,) for position in _positions(completion.tokens, completion.logprobs, completion.top_logprobs)]


def _prompt_positions(tokens: Sequence[int], result: GenerationResult) -> list[Position | None] | None:
    if result.prompt is None:
        return None
    return [None, *_positions(tokens[1:], result.prompt.logprobs, result.prompt.top_logprobs)]


def _positions(tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Alternatives]) -> list[Position]:
    positions = [{token: max(logprob, LOWEST)} for token, logprob in zip(tokens, logprobs, strict=True)]
    for position, alternatives in zip(positions, top, strict=False):  # `top` is empty without alternatives
        for token, logprob in alternatives:
            position.setdefault(token, max(logprob, LOWEST))
    return positions


class SglangParams(NativeFields, frozen=True, kw_only=True):
    """`sampling_params`; max_new_tokens and min_new_tokens have precedence over their other names."""

    max_new_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    sampling_seed: Seed | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None


class SglangRequest(Struct, frozen=True, kw_only=True):
    """The request body: either `text` or `input_ids`."""

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    top_logprobs_num: TopLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    model: str | None = None
    rid: str | None = None


class FinishReason(Struct, frozen=True, kw_only=True):
    """The finish reason, with the stop string or token (`matched`) or the number of tokens (`length`)."""

    type: str
    matched: str | int | UnsetType = UNSET
    length: int | UnsetType = UNSET


class MetaInfo(ServedBy, frozen=True, kw_only=True):
    """SGLang's `meta_info`; weight_version: SGLang's name for the policy version, a string."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    weight_version: str
    output_token_logprobs: list[TokenEntry] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenEntry]] | UnsetType = UNSET


class SglangResponse(Struct, frozen=True, kw_only=True):
    """One completion."""

    text: str
    output_ids: tuple[int, ...]
    meta_info: MetaInfo


def parse_sglang_request(body_fields: dict[str, Any], context: ServerContext) -> NativeRequest:
    """Parse a request in SGLang's format. Raises ApiError."""
    fields, ignored = decode_known(body_fields, SglangRequest)
    params, ignored_params = decode_known(fields.sampling_params or {}, SglangParams)
    model = find_served(fields.model or params.model, context)
    if params.model is not None:
        find_served(params.model, context)
    if (fields.text is None) == (fields.input_ids is None):
        raise invalid_field("input_ids", "set either input_ids or text")
    param = "text" if fields.input_ids is None else "input_ids"
    check_choices(params.n, 1, param, context)
    tokens = tokenize(fields.text or "" if fields.input_ids is None else fields.input_ids, context, param=param)
    if params.sampling_seed is not None:
        params = structs.replace(params, seed=params.sampling_seed)
    if params.min_new_tokens is not None:
        params = structs.replace(params, min_tokens=params.min_new_tokens)
    limit = params.max_new_tokens or params.max_completion_tokens or params.max_tokens
    top = (fields.top_logprobs_num or 0) if fields.return_logprob else None
    grammars = _sglang_grammars(params)
    request_id = fields.rid[:64] if fields.rid else secrets.token_hex(16)
    request = build_request(
        params,
        [tokens],
        param,
        limit,
        top,
        context,
        model=model,
        fit_context=True,
        request_id=request_id,
        grammars=grammars,
    )
    all_ignored = (*ignored, *(f"sampling_params.{name}" for name in ignored_params))

    def choice(index: int, completion: Completion, result: GenerationResult) -> SglangResponse:
        """Build the response of SGLang for one completion."""
        meta = MetaInfo(
            **served_by([completion], result, all_ignored),
            id=request_id if request.n == 1 else f"{request_id}-{index}",
            finish_reason=_sglang_finish_reason(completion),
            prompt_tokens=len(tokens),
            completion_tokens=len(completion.tokens),
            weight_version=str(result.weights.version),
            **_sglang_logprobs(
                completion, request.top_logprobs, context.tokenizer if fields.return_text_in_logprobs else None
            ),
        )
        return SglangResponse(text=completion.text, output_ids=completion.tokens, meta_info=meta)

    def respond(result: GenerationResult) -> Struct | list[Struct]:
        choices: list[Struct] = [choice(index, one, result) for index, one in enumerate(result.completions)]
        return choices if request.n > 1 else choices[0]

    return NativeRequest(request=request, respond=respond)


def _sglang_grammars(params: SglangParams) -> list[Grammar]:
    found = [json_grammar(params.json_schema, "json_schema")] if params.json_schema is not None else []
    if params.regex is not None:
        found.append(Grammar(kind="regex", text=params.regex, param="regex"))
    if params.ebnf is not None:
        found.append(Grammar(kind="grammar", text=params.ebnf, param="ebnf"))
    return found


def _sglang_finish_reason(completion: Completion) -> FinishReason:
    reason = completion.finish_reason
    if reason == "length":
        return FinishReason(type=reason, length=len(completion.tokens))
    return FinishReason(type=reason, matched=UNSET if completion.stop_reason is None else completion.stop_reason)


def _sglang_logprobs(completion: Completion, top: int | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if top is None:
        return {}
    entries = _entries(list(zip(completion.tokens, completion.logprobs, strict=True)), tokenizer)
    alternatives = [_entries(position, tokenizer) for position in completion.top_logprobs] if top else UNSET
    return {"output_token_logprobs": entries, "output_top_logprobs": alternatives}


def _entries(pairs: Sequence[tuple[int, float]] | Alternatives, tokenizer: Tokenizer | None) -> list[TokenEntry]:
    return [
        (max(logprob, LOWEST), token, tokenizer.token_text(token) if tokenizer else None) for token, logprob in pairs
    ]


class TrlRequest(NativeFields, frozen=True, kw_only=True):
    """The request body. prompts: strings or lists of token IDs."""

    prompts: Annotated[list[str | list[TokenId]], Meta(min_length=1)]
    guided_decoding_regex: str | None = None
    structured_outputs_regex: str | None = None


class TrlResponse(ServedBy, frozen=True, kw_only=True):
    """The response body. Row `i * n + j` is completion j of prompt i, with the log-probabilities of its tokens."""

    prompt_ids: list[tuple[int, ...]]
    completion_ids: list[tuple[int, ...]]
    logprobs: list[list[float]]
    finish_reasons: list[str]


def parse_trl_request(body: bytes, context: ServerContext) -> NativeRequest:
    """Parse the body of /v1/generate. Raises ApiError."""
    fields, ignored = decode_known(json_object(body), TrlRequest)
    model = find_served(fields.model, context)
    check_choices(fields.n, len(fields.prompts), "prompts", context)
    prompts = [tokenize(prompt, context, param="prompts") for prompt in fields.prompts]
    named = {"guided_decoding_regex": fields.guided_decoding_regex}
    named["structured_outputs_regex"] = fields.structured_outputs_regex
    grammars = [Grammar(kind="regex", text=text, param=name) for name, text in named.items() if text is not None]
    request = build_request(
        fields, prompts, "prompts", fields.max_tokens, None, context, model=model, fit_context=True, grammars=grammars
    )

    def respond(result: GenerationResult) -> TrlResponse:
        return TrlResponse(
            **served_by(result.completions, result, ignored),
            prompt_ids=prompts,
            completion_ids=[completion.tokens for completion in result.completions],
            logprobs=[[max(value, LOWEST) for value in completion.logprobs] for completion in result.completions],
            finish_reasons=[completion.finish_reason for completion in result.completions],
        )

    return NativeRequest(request=request, respond=respond)
