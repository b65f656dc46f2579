"""POST /inference/v1/generate, vLLM's route for tokens: token IDs in, token IDs and log-probabilities out."""

from __future__ import annotations

import secrets
import struct
from base64 import b64encode
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
from clotho.serving.openai_fields import RequestId
from clotho.serving.openai_requests import build_request, check_choices
from clotho.serving.openai_responses import (
    ChatLogprobs,
    PromptPosition,
    TokenIdTexts,
    Usage,
    chat_logprobs,
    prompt_positions,
)
from clotho.serving.services import ServerContext, find_served
from protocols.sampling import (
    MAX_SUPPORT,
    Completion,
    ExpertRoutes,
    TokenId,
    TopLogprobs,
    can_record_support,
    restricts_support,
)


class TokenParams(NativeFields, frozen=True, kw_only=True):
    """`sampling_params`. logprobs, prompt_logprobs: alternatives per completion token and per prompt token.

    routed_experts_prompt_start: first token of the prompt whose experts are returned.
    """

    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] = 0


class TokensRequest(Struct, frozen=True, kw_only=True):
    """The request body. return_sampling_mask: return the tokens that could have been sampled at each position.

    return_routed_experts: return the experts that computed each token.
    """

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    request_id: RequestId | None = None
    return_sampling_mask: bool | None = None
    return_routed_experts: bool | None = None


class RoutedExperts(Struct, frozen=True, kw_only=True):
    """The experts of the tokens from `start` on, prompt included, without the last token, which is not computed.

    data: numbers of the experts as little-endian `dtype`, in base64. shape: (tokens, layers with experts, experts).
    """

    data: str
    shape: tuple[int, int, int]
    dtype: str
    start: int


class TokensChoice(Struct, frozen=True, kw_only=True):
    """One completion. Each token of `logprobs` is named `token_id:ID`.

    sampling_mask: per token, the IDs that could have been sampled; null if that is the whole vocabulary.
    routed_experts: null for a model without experts.
    """

    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None
    sampling_mask: list[tuple[int, ...]] | UnsetType | None = UNSET
    routed_experts: RoutedExperts | UnsetType | None = UNSET


class TokensResponse(ServedBy, frozen=True, kw_only=True):
    """The response body. prompt_logprobs: null at the first token, which has no context."""

    request_id: str
    choices: list[TokensChoice]
    usage: Usage
    prompt_logprobs: list[PromptPosition | None] | None = None


def parse_tokens_request(body: bytes, context: ServerContext) -> NativeRequest:
    """Parse the body of /inference/v1/generate. Raises ApiError."""
    fields, ignored = decode_known(json_object(body), TokensRequest)
    params, ignored_params = decode_known(fields.sampling_params or {}, TokenParams)
    model = find_served(fields.model, context)
    check_choices(params.n, 1, "token_ids", context)
    tokens = tuple(fields.token_ids)
    with_mask, request_id = bool(fields.return_sampling_mask), fields.request_id or secrets.token_hex(16)
    request = build_request(
        params,
        [tokens],
        "token_ids",
        params.max_tokens,
        params.logprobs,
        context,
        model=model,
        fit_context=True,
        record_support=with_mask,
        request_id=request_id,
    )
    if fields.return_routed_experts:
        samples = tuple(structs.replace(sample, record_routes=True) for sample in request.samples)
        request = structs.replace(request, samples=samples)
    sampling = request.samples[0].sampling
    if with_mask and restricts_support(sampling) and not can_record_support(sampling):
        raise invalid_field("return_sampling_mask", f"requires top_k of 1 to {MAX_SUPPORT}, or no filter")
    all_ignored = (*ignored, *(f"sampling_params.{name}" for name in ignored_params))

    def respond(result: GenerationResult) -> TokensResponse:
        """Build the response of vLLM's route for tokens."""
        counts = sum(len(completion.tokens) for completion in result.completions)
        choices = [
            _choice(
                index,
                completion,
                params.logprobs,
                context,
                with_mask=with_mask,
                experts_from=params.routed_experts_prompt_start if fields.return_routed_experts else None,
            )
            for index, completion in enumerate(result.completions)
        ]
        return TokensResponse(
            **served_by(result.completions, result, all_ignored),
            request_id=request_id,
            choices=choices,
            usage=Usage(prompt_tokens=len(tokens), completion_tokens=counts, total_tokens=len(tokens) + counts),
            prompt_logprobs=None
            if result.prompt is None
            else prompt_positions(tokens, result.prompt, context.tokenizer, top=params.prompt_logprobs or 0),
        )

    return NativeRequest(request=request, respond=respond, prompt_logprobs=params.prompt_logprobs)


def _choice(
    index: int,
    completion: Completion,
    top: int | None,
    context: ServerContext,
    *,
    with_mask: bool,
    experts_from: int | None,
) -> TokensChoice:
    """Return one completion. experts_from: first token whose experts are returned; None: of no token."""
    logprobs = None
    if top is not None:
        names = TokenIdTexts(context.tokenizer)
        logprobs = chat_logprobs(completion.tokens, completion.logprobs, completion.top_logprobs, names)
    masks = [struct.unpack(f"<{len(support) // 4}I", support) for support in completion.supports]
    return TokensChoice(
        index=index,
        token_ids=completion.tokens,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        logprobs=logprobs,
        sampling_mask=(masks or None) if with_mask else UNSET,
        routed_experts=UNSET if experts_from is None else _routed_experts(completion.routes, experts_from),
    )


def _routed_experts(routes: ExpertRoutes | None, start: int) -> RoutedExperts | None:
    if routes is None:
        return None
    data = routes.experts[start * routes.token_bytes :]
    return RoutedExperts(
        data=b64encode(data).decode(),
        shape=(len(data) // routes.token_bytes, routes.layers, routes.per_token),
        dtype=f"uint{8 * routes.number_bytes}",
        start=start,
    )
