"""Request bodies of /v1/completions, their conversion to sampling requests, and prompts as text or tokens."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, structs

from clotho.serving.errors import invalid_field
from clotho.serving.openai_fields import OpenaiFields
from clotho.serving.openai_requests import (
    Prompt,
    ValidatedRequest,
    build_request,
    check_choices,
    check_length,
    check_tokens,
    decode,
    run_tokenizer,
    truncated,
    with_options,
)
from clotho.serving.services import ServerContext, find_served
from protocols.sampling import TokenId, TopLogprobs


class CompletionRequest(OpenaiFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions. prompt: a string, a list of token IDs, or a list of either.

    max_tokens: 0 samples nothing, and requires `echo`.
    """

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: TopLogprobs | None = None


def parse_completion_request(body: bytes, context: ServerContext) -> ValidatedRequest:
    """Parse the body of /v1/completions. Raises ApiError."""
    fields = decode(body, CompletionRequest)
    model = find_served(fields.model, context)
    texts = _split_prompts(fields.prompt)
    check_choices(fields.n, len(texts), "prompt", context)
    prompts = [truncated(tokenize(prompt, context), fields, context) for prompt in texts]
    limit = fields.max_tokens or None
    request = build_request(
        fields, prompts, "prompt", limit, fields.logprobs, context, model=model, request_id=fields.request_id or ""
    )
    echo = tuple(
        text if isinstance(text, str) and fields.truncate_prompt_tokens is None else _decoded(prompt, context)
        for text, prompt in zip(texts if fields.echo else (), prompts, strict=False)
    )
    if fields.max_tokens == 0:
        if not echo or fields.stream:
            raise invalid_field("max_tokens", "0 requires echo: true, without stream")
        request = structs.replace(request, samples=())
    return with_options(request, fields, echo)


def _split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    texts = [part for part in prompt if isinstance(part, str)]
    tokens = [part for part in prompt if isinstance(part, int)]
    lists = [part for part in prompt if isinstance(part, list)]
    if not prompt:
        raise invalid_field("prompt", "must not be empty")
    if len(prompt) not in (len(texts), len(tokens), len(lists)):
        raise invalid_field("prompt", "mixes strings, tokens and lists of tokens; use one kind")
    return [tokens] if tokens else [*texts, *lists]


def _decoded(prompt: Prompt, context: ServerContext) -> str:
    """Return the text of a prompt."""
    check_tokens("prompt", prompt, context)
    return context.tokenizer.decode(prompt, skip_special_tokens=False)


def tokenize(
    prompt: str | list[int], context: ServerContext, *, param: str = "prompt", add_special_tokens: bool = True
) -> Prompt:
    """Return the token IDs of a prompt; a list of token IDs is returned unchanged."""
    if isinstance(prompt, list):
        return tuple(prompt)
    check_length(len(prompt.encode()), param, context)
    return run_tokenizer(lambda: context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), param)
