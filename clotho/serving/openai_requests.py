"""Requests of the OpenAI API: decoding, rendering of conversations, and conversion to sampling requests.

The functions are synchronous and thread-safe: tokenization of long texts runs in a worker thread.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import jinja2
import msgspec
from msgspec import Meta, Struct, structs

from clotho.serving.bodies import json_object
from clotho.serving.chat_extension import Conversation, Prompt, ValidatedRequest, chat_extension
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.openai_fields import (
    HINTS,
    IGNORED,
    NO_SEED,
    SCALAR_PARAMETERS,
    UNSUPPORTED,
    ChatRequest,
    ConstraintFields,
    GenerationFields,
    Message,
    OpenaiFields,
    SamplingFields,
)
from clotho.serving.services import ServedModel, ServerContext, find_served
from protocols.constraints import Grammar
from protocols.sampling import (
    MAX_BAD_WORD_TOKENS,
    PARAMETERS,
    SampleRequest,
    Sampling,
    TokenId,
    TopLogprobs,
    below_least_positive,
    can_record_support,
    completion_seeds,
)

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize", "conversation"})
"""Variables of chat templates that requests do not set by `chat_template_kwargs`."""


R = TypeVar("R", bound=SamplingFields)
Fields = TypeVar("Fields", bound=Struct)
T = TypeVar("T")


def decode(body: bytes, kind: type[R]) -> R:
    """Decode a request body. Raises ApiError with status 400 that names the invalid field."""
    return decode_fields(json_object(body), kind)


def decode_fields(body: dict[str, Any], kind: type[R]) -> R:
    """Decode the fields of a request body, as `decode`."""
    fields = without_unsupported(body, UNSUPPORTED)
    ignored = (IGNORED | HINTS).difference(kind.__struct_fields__)
    return converted({name: value for name, value in fields.items() if name not in ignored}, kind)


def converted(fields: dict[str, Any], kind: type[Fields], *, strict: bool = True) -> Fields:
    """Return fields as a struct. strict: as of msgspec. Raises ApiError with status 400 that names the field."""
    try:
        return msgspec.convert(fields, kind, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        found = re.search(r"(?<=\$\.)\w+", path) or re.search(r"(?<=field `)\w+", message)
        param = found.group() if found else None
        raise ApiError(400, f"{param}: {message}" if path and param else message, param=param) from error


def without_unsupported(fields: dict[str, Any], unsupported: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
    """Return the supported fields. Raises ApiError with status 400 if an unsupported field has an effective value."""
    for name, accepted in unsupported.items():
        value = fields.get(name)
        if value is not None and not any(is_same(value, one) for one in accepted):
            raise invalid_field(name, "not supported by this server")
    return {name: value for name, value in fields.items() if name not in unsupported}


def is_same(value: object, other: object) -> bool:
    """Return True if two JSON values are equal. Unlike in Python, a boolean does not equal a number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def parse_chat_request(body: bytes, context: ServerContext) -> ValidatedRequest:
    """Parse the body of /v1/chat/completions and apply the chat template. Raises ApiError."""
    return validated_chat(decode(body, ChatRequest), context)


def rendered_chat(fields: ChatRequest, context: ServerContext) -> tuple[Conversation, list[dict[str, Any]], Prompt]:
    """Return a conversation, its messages as the chat template reads them, and its tokens. Raises ApiError."""
    chat = chat_extension(context).conversation(fields, context)
    messages = text_messages(chat.messages, context)
    prompt = render_prompt(
        messages,
        context,
        add_generation_prompt=fields.add_generation_prompt,
        tools=chat.tools,
        variables={**chat.variables, **(fields.chat_template_kwargs or {})},
        continues=bool(fields.continue_final_message),
    )
    return chat, messages, prompt


def validated_chat(fields: ChatRequest, context: ServerContext, *, fit_context: bool = False) -> ValidatedRequest:
    """Validate a conversation and apply the chat template. fit_context: see `build_request`. Raises ApiError."""
    model = find_served(fields.model, context)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid_field("top_logprobs", "requires logprobs: true")
    limit = fields.max_completion_tokens
    if limit is not None and fields.max_tokens not in (None, limit):
        raise invalid_field("max_tokens", "differs from max_completion_tokens; set only one of the two")
    check_choices(fields.n, 1, "messages", context)
    chat, messages, prompt = rendered_chat(fields, context)
    request = build_request(
        chat.fields,
        [truncated(prompt, fields, context)],
        "messages",
        limit or fields.max_tokens,
        (fields.top_logprobs or 0) if fields.logprobs else None,
        context,
        model=model,
        fit_context=fit_context,
        request_id=fields.request_id or "",
        grammars=chat.grammars,
    )
    echoed = fields.echo and messages[-1]["role"] == "assistant"
    return chat.finished(with_options(request, fields, (messages[-1]["content"],) if echoed else ()))


def truncated(prompt: Prompt, fields: OpenaiFields, context: ServerContext) -> Prompt:
    """Keep the last tokens of a prompt, if the request says so."""
    kept = fields.truncate_prompt_tokens
    if kept is None:
        return prompt
    if kept == 0:
        raise invalid_field("truncate_prompt_tokens", "must be -1 or at least 1")
    return prompt[-(context.context_length - 1 if kept == -1 else kept) :]


def with_options(request: ValidatedRequest, fields: OpenaiFields, echo: tuple[str, ...]) -> ValidatedRequest:
    """Add the options of the response."""
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid_field("prompt_logprobs", "not available with stream: true")
    return structs.replace(
        request,
        echo=echo,
        prompt_logprobs=fields.prompt_logprobs,
        return_tokens_as_token_ids=bool(fields.return_tokens_as_token_ids),
    )


def encode_plain(text: str, param: str, context: ServerContext) -> Prompt:
    """Return the tokens of a text without the special tokens that the tokenizer adds to a prompt."""
    return run_tokenizer(lambda: context.tokenizer.encode(text, add_special_tokens=False), param)


def check_choices(n: int | None, prompts: int, param: str, context: ServerContext) -> None:
    """Raise ApiError for too many completions, before anything is tokenized. param: field of the prompts."""
    each, limit = n or 1, context.settings.max_choices
    if each > limit:
        raise invalid_field("n", f"{each} exceeds this server's limit of {limit} completions per request")
    if each * prompts > limit:
        total = f"{prompts} prompts with {each} completions each"
        raise invalid_field(param, f"{total} exceed this server's limit of {limit} completions per request")


def check_length(text_bytes: int, param: str, context: ServerContext) -> None:
    """Refuse a text that does not fit into the context even if every token is the longest one, before tokenization."""
    limit = context.context_length * context.tokenizer.longest_token_bytes
    if text_bytes > limit:
        length = f"{text_bytes} bytes of text do not fit into the context of {context.context_length} tokens"
        raise invalid_field(param, f"{length}, at most {limit} bytes")


def run_tokenizer(work: Callable[[], T], param: str) -> T:
    """Run the tokenizer or the chat template; their exceptions become 400 errors."""
    try:
        return work()
    except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
        raise invalid_field(param, f"cannot be tokenized: {error}") from error


def text_messages(messages: list[Message], context: ServerContext) -> list[dict[str, Any]]:
    """Return the messages of a conversation for the chat template."""
    return [_text_message(message, index, context) for index, message in enumerate(messages)]


def render_prompt(
    messages: list[dict[str, Any]],
    context: ServerContext,
    *,
    add_generation_prompt: bool | None,
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> Prompt:
    """Apply the chat template. continues: the completion continues the last message. Raises ApiError."""
    if reserved := [name for name in variables or {} if name in RESERVED or name.endswith("_token")]:
        raise invalid_field("chat_template_kwargs", f"{reserved[0]} cannot be set by a request")
    if continues and add_generation_prompt:
        raise invalid_field("continue_final_message", "excludes add_generation_prompt: true")
    if continues and (messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip()):
        raise invalid_field("continue_final_message", "requires a last message of the assistant with a content")
    size = sum(len(message["content"].encode()) for message in messages)
    check_length(size + sum(len(json.dumps(tool)) for tool in tools), "tools" if tools else "messages", context)
    return run_tokenizer(
        lambda: context.tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt is not False and not continues,
            tools=tools,
            variables=variables,
            continue_final_message=continues,
        ),
        "messages",
    )


def _text_message(message: Message, index: int, context: ServerContext) -> dict[str, Any]:
    content = message.content
    special = message.role == "tool" or message.tool_calls or message.tool_call_id or message.reasoning_content
    extra = chat_extension(context).message_fields(message, index, context.tokenizer.chat_template) if special else {}
    if content is None:
        if not message.tool_calls:
            raise invalid_field("messages", f"message {index} has no content")
        content = ""
    if not isinstance(content, str):
        for part in content:
            if part.type != "text" or part.text is None:
                kind = part.type[:64]
                raise invalid_field("messages", f"message {index} has a part of type {kind!r}; only text is supported")
        content = "".join(part.text or "" for part in content)
    return {"role": "system" if message.role == "developer" else message.role, "content": content, **extra}


def build_request(
    fields: GenerationFields,
    prompts: list[Prompt],
    param: str,
    max_tokens: int | None,
    top_logprobs: int | None,
    context: ServerContext,
    *,
    model: ServedModel,
    fit_context: bool = False,
    record_support: bool = False,
    request_id: str = "",
    grammars: Sequence[Grammar] = (),
) -> ValidatedRequest:
    """Combine the fields of a request with the server's defaults. Raises ApiError. Requires `check_choices`.

    param: name of the request field that contains the prompts. model, top_logprobs: see `ValidatedRequest`.
    fit_context: reduce a `max_tokens` that does not fit into the context instead of rejecting it.
    record_support, request_id: see `SampleRequest`. grammars: those of fields that other endpoints lack.
    """
    n = fields.n or 1
    request_id = request_id or secrets.token_hex(12)
    if fields.stream_options is not None and not fields.stream:
        raise invalid_field("stream_options", "requires stream: true")
    sampling = _sampling(fields, top_logprobs, context)
    grammar = None
    if grammars or any(getattr(fields, name) is not None for name in ConstraintFields.__struct_fields__):
        grammar = chat_extension(context).grammar(fields, grammars)
    if grammar is not None and getattr(fields, "ignore_eos", None) is None:
        sampling = structs.replace(sampling, ignore_eos=False)
    if max_tokens is not None:
        sampling = structs.replace(sampling, max_tokens=max_tokens)
    given = None if fields.seed == NO_SEED else fields.seed
    seed = given if given is not None else secrets.randbits(63)
    prompt_seeds = [seed + (0 if given is not None else index) for index in range(len(prompts))]
    return ValidatedRequest(
        model=model,
        prompts=tuple(prompts),
        samples=tuple(
            SampleRequest(
                prompt=prompt,
                sampling=_limit_to_context(sampling, prompt, param, None if fit_context else max_tokens, context),
                seeds=completion_seeds(prompt_seed, n),
                reuse_prefix=True,
                record_support=(context.record_supports or record_support) and can_record_support(sampling),
                record_routes=context.record_routes,
                request_id=request_id,
                weights=model.source,
                special_tokens=fields.skip_special_tokens is False,
                include_stop=bool(fields.include_stop_str_in_output),
            )
            for prompt, prompt_seed in zip(prompts, prompt_seeds, strict=True)
        ),
        n=n,
        top_logprobs=top_logprobs,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_token_ids=bool(fields.return_token_ids),
        request_id=request_id,
        grammar=grammar,
    )


def _bad_words(words: Sequence[str], encode: Callable[[str], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of excluded words, alone and behind a space as in vLLM. Raises ApiError."""
    found = []
    for word in words:
        plain, spaced = encode(word.lstrip()), encode(f" {word.lstrip()}")
        if not plain or len(spaced) > MAX_BAD_WORD_TOKENS:
            raise invalid_field("bad_words", f"{word[:64]!r} is not a sequence of 1 to {MAX_BAD_WORD_TOKENS} tokens")
        found += [plain, spaced] if spaced[0] != plain[0] and len(spaced) == len(plain) else [plain]
    return tuple(found)


def _sampling(fields: GenerationFields, top_logprobs: int | None, context: ServerContext) -> Sampling:
    """Return the sampling parameters: the request's fields over the server's defaults. `Sampling` checks the ranges."""
    values = {name: getattr(context.sampling, name) for name in Sampling.__struct_fields__}
    values |= {name: value for name in SCALAR_PARAMETERS if (value := getattr(fields, name)) is not None}
    if values["top_k"] >= context.vocab_size:
        values["top_k"] = 0
    if fields.stop is not None:
        values["stop"] = tuple(
            text for text in ([fields.stop] if isinstance(fields.stop, str) else fields.stop) if text
        )
    tokens = {"stop_token_ids": fields.stop_token_ids, "allowed_token_ids": fields.allowed_token_ids}
    values |= {name: tuple(given) for name, given in tokens.items() if given is not None}
    if fields.logit_bias is not None:
        values["logit_bias"] = tuple(fields.logit_bias.items())
    if fields.bad_words is not None:
        values["bad_words"] = _bad_words(fields.bad_words, lambda text: encode_plain(text, "bad_words", context))
    sampling = converted({**values, "top_logprobs": top_logprobs or 0}, Sampling)
    if (name := below_least_positive(sampling)) is not None:
        raise invalid_field(name, f"{getattr(sampling, name):g} is not {PARAMETERS[name].allowed}")
    check_tokens("stop_token_ids", sampling.stop_token_ids, context)
    check_tokens("logit_bias", tuple(token for token, _ in sampling.logit_bias), context)
    check_tokens("allowed_token_ids", sampling.allowed_token_ids, context)
    return sampling


def check_tokens(param: str, tokens: Prompt, context: ServerContext) -> None:
    """Raise ApiError if a token is not in the vocabulary. param: name of the request field that contains it."""
    largest = max(tokens, default=0)
    if largest >= context.vocab_size:
        raise invalid_field(param, f"token {largest} is not in the vocabulary of {context.vocab_size} tokens")


def _limit_to_context(
    sampling: Sampling, prompt: Prompt, param: str, required: int | None, context: ServerContext
) -> Sampling:
    """Check the prompt and limit max_tokens to the rest of the context; `required` tokens must fit."""
    if not prompt:
        raise invalid_field(param, "must not be empty")
    check_tokens(param, prompt, context)
    room = context.context_length - len(prompt)
    if room < 1:
        raise invalid_field(param, f"{len(prompt)} tokens fill the context of {context.context_length} tokens")
    if required is not None and required > room:
        used = f"the prompt uses {len(prompt)} of the context's {context.context_length} tokens"
        message = f"{required} tokens do not fit: {used}"
        raise invalid_field("max_tokens", message)
    limit = min(sampling.max_tokens, room)
    if sampling.min_tokens > limit:
        raise invalid_field("min_tokens", f"{sampling.min_tokens} exceeds the maximum of {limit} tokens")
    return structs.replace(sampling, max_tokens=limit)


class CompletionRequest(OpenaiFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions. max_tokens: 0 samples nothing, and requires `echo`."""

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
