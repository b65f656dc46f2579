"""From what a client asked to what the engine is asked: prompts become tokens, defaults are filled in, limits checked.

Synchronous and thread-safe: tokenising megabytes of text happens in a worker thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import jinja2
import msgspec
from msgspec import Struct, structs

from clotho.serving.errors import ApiError, invalid
from clotho.serving.openai_requests import (
    SCALAR_PARAMETERS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Message,
    decode,
    refused,
)
from clotho.serving.services import GatewayServices
from protocols.prompt import completion_seeds
from protocols.sampling import SampleRequest, Sampling, can_record_support

Prompt = tuple[int, ...]


class Ask(Struct, frozen=True, kw_only=True):
    """A checked request: one `SampleRequest` per prompt, `n` completions each.

    top_logprobs: alternatives to report per token; None: no log-probabilities at all.
    """

    requests: tuple[SampleRequest, ...]
    n: int
    top_logprobs: int | None
    stream: bool
    include_usage: bool
    return_token_ids: bool

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(request.prompt) for request in self.requests)


def completion_ask(body: bytes, services: GatewayServices) -> Ask:
    """Read the body of /v1/completions; raises ApiError."""
    asked = decode(body, CompletionRequest)
    check_model(asked.model, services)
    prompts = [encoded(prompt, services) for prompt in _prompts(asked.prompt)]
    return build_ask(asked, prompts, "prompt", asked.max_tokens, asked.logprobs, services)


def chat_ask(body: bytes, services: GatewayServices) -> Ask:
    """Read the body of /v1/chat/completions; raises ApiError."""
    asked = decode(body, ChatRequest)
    check_model(asked.model, services)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    limit = asked.max_completion_tokens
    if limit is not None and asked.max_tokens not in (None, limit):
        raise invalid("max_tokens", "differs from max_completion_tokens, its newer name; give one")
    messages = [_plain(message, index) for index, message in enumerate(asked.messages)]
    generation = asked.add_generation_prompt is not False
    prompt = _tokens(lambda: services.tokenizer.render_chat(messages, add_generation_prompt=generation), "messages")
    top_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    return build_ask(asked, [prompt], "messages", limit or asked.max_tokens, top_logprobs, services)


def check_model(model: str | None, services: GatewayServices) -> None:
    """Refuse any model but the one that is served, with 404; None means that one."""
    if model is not None and model != services.settings.model_name:
        shown = model if len(model) <= 200 else model[:200] + "..."
        message = f"The model {shown!r} does not exist; this server has {services.settings.model_name!r}."
        raise ApiError(404, message, param="model", code="model_not_found")


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    texts = [part for part in prompt if isinstance(part, str)]
    tokens = [part for part in prompt if isinstance(part, int)]
    lists = [part for part in prompt if isinstance(part, list)]
    if not prompt:
        raise invalid("prompt", "is empty")
    if len(prompt) not in (len(texts), len(tokens), len(lists)):
        raise invalid("prompt", "mixes texts, tokens and lists of tokens")
    return [tokens] if tokens else [*texts, *lists]


def encoded(prompt: str | list[int], services: GatewayServices, *, param: str = "prompt") -> Prompt:
    """Return the tokens of a text; tokens are taken as they are."""
    if isinstance(prompt, list):
        return tuple(prompt)
    return _tokens(lambda: services.tokenizer.encode(prompt), param)


def _tokens(encode: Callable[[], Prompt], param: str) -> Prompt:
    """Run the tokenizer or the chat template; what they object to is the client's to change."""
    try:
        return tuple(encode())
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise invalid(param, f"cannot be tokenised: {error}") from error


def _plain(message: Message, index: int) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        for part in content:
            if part.type != "text" or part.text is None:
                raise invalid("messages", f"message {index} has a part of type {part.type[:64]!r}: not supported")
        content = "".join(part.text or "" for part in content)
    return {"role": "system" if message.role == "developer" else message.role, "content": content}


def build_ask(
    asked: GenerationFields,
    prompts: list[Prompt],
    param: str,
    max_tokens: int | None,
    top_logprobs: int | None,
    services: GatewayServices,
    *,
    fit_context: bool = False,
) -> Ask:
    """Lay what was asked over the defaults, for every prompt; raises ApiError.

    param: what the prompts' field is called. top_logprobs: see `Ask`. fit_context: a `max_tokens` that exceeds what the
    context leaves is cut to it, not refused.
    """
    n = asked.n or 1
    most = services.settings.max_choices
    if n > most:
        raise invalid("n", f"{n} is more than this server's limit of {most}")
    if n * len(prompts) > most:
        raise invalid(param, f"{len(prompts)} prompts of {n} completions are more than this server's limit of {most}")
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options", "needs stream: true")
    sampling = _sampling(asked, top_logprobs, services)
    if max_tokens is not None:
        sampling = structs.replace(sampling, max_tokens=max_tokens)
    seed = asked.seed if asked.seed is not None else secrets.randbits(63)
    seeded = [seed] * len(prompts) if asked.seed is not None else [seed + index for index in range(len(prompts))]
    return Ask(
        requests=tuple(
            SampleRequest(
                prompt=prompt,
                sampling=_bounded(sampling, prompt, param, None if fit_context else max_tokens, services),
                seeds=completion_seeds(own_seed, n),
                reuse_prefix=True,
                record_support=services.record_supports and can_record_support(sampling),
            )
            for prompt, own_seed in zip(prompts, seeded, strict=True)
        ),
        n=n,
        top_logprobs=top_logprobs,
        stream=bool(asked.stream),
        include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
        return_token_ids=bool(asked.return_token_ids),
    )


def _sampling(asked: GenerationFields, top_logprobs: int | None, services: GatewayServices) -> Sampling:
    """Lay the request's fields over the defaults; `Sampling` itself states the ranges."""
    fields = {name: getattr(services.sampling, name) for name in Sampling.__struct_fields__}
    fields |= {name: value for name in SCALAR_PARAMETERS if (value := getattr(asked, name)) is not None}
    if fields["top_k"] >= services.vocab_size:
        fields["top_k"] = 0
    if asked.stop is not None:
        fields["stop"] = tuple(text for text in ([asked.stop] if isinstance(asked.stop, str) else asked.stop) if text)
    if asked.stop_token_ids is not None:
        fields["stop_token_ids"] = tuple(asked.stop_token_ids)
    if asked.logit_bias is not None:
        fields["logit_bias"] = tuple(asked.logit_bias.items())
    try:
        sampling = msgspec.convert({**fields, "top_logprobs": top_logprobs or 0}, Sampling)
    except msgspec.ValidationError as error:
        raise refused(error) from error
    _check_tokens("stop_token_ids", sampling.stop_token_ids, services)
    _check_tokens("logit_bias", tuple(token for token, _ in sampling.logit_bias), services)
    return sampling


def _check_tokens(param: str, tokens: Prompt, services: GatewayServices) -> None:
    worst = max(tokens, default=0)
    if worst >= services.vocab_size:
        raise invalid(param, f"token {worst} is not in the vocabulary, which ends at {services.vocab_size - 1}")


def _bounded(
    sampling: Sampling, prompt: Prompt, param: str, promised: int | None, services: GatewayServices
) -> Sampling:
    """Check the prompt; cut the completion to what the context leaves, but refuse to cut what was `promised`."""
    if not prompt:
        raise invalid(param, "is empty")
    _check_tokens(param, prompt, services)
    room = services.context_length - len(prompt)
    if room < 1:
        raise invalid(param, f"{len(prompt)} tokens leave no room in the context of {services.context_length}")
    if promised is not None and promised > room:
        message = f"{promised} do not fit: the prompt has {len(prompt)} of the context's {services.context_length}"
        raise invalid("max_tokens", message)
    return structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
