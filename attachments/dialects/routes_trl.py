"""POST /v1/generate in the format of TRL's vLLM server: many prompts, one row of token IDs per completion."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from attachments.dialects.native import (
    GenerationResult,
    NativeFields,
    NativeRequest,
    ServedBy,
    decode_known,
    served_by,
)
from clotho.serving.bodies import json_object
from clotho.serving.openai_requests import build_request, check_choices, tokenize
from clotho.serving.openai_responses import LOWEST
from clotho.serving.services import ServerContext, find_served
from protocols.constraints import Grammar
from protocols.sampling import TokenId


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
