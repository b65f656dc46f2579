"""The routes of vLLM about tokens: text or a conversation to token IDs and back, and what the tokenizer is."""

from __future__ import annotations

from msgspec import Struct

from clotho.serving.bodies import json_object
from clotho.serving.errors import invalid_field
from clotho.serving.openai_fields import Messages, TemplateVariables
from clotho.serving.openai_requests import (
    check_tokens,
    converted,
    render_prompt,
    run_tokenizer,
    text_messages,
    tokenize,
)
from clotho.serving.services import ServerContext, find_served
from protocols.sampling import TokenId


class TokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize with a text. add_special_tokens: those that the tokenizer adds to a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize with a conversation."""

    messages: Messages
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    """The tokens of a text. token_strs: the text of each token, if requested."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class DetokenizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeResponse(Struct, frozen=True, kw_only=True):
    """The text of tokens, special tokens included."""

    prompt: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """The response of GET /tokenizer_info: the texts of special tokens, null where the tokenizer has none.

    chat_template: source of the template; null if there is none. model_max_length: tokens of the context.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None
    model_max_length: int


def tokenizer_info(context: ServerContext) -> TokenizerInfo:
    """Return the response of /tokenizer_info."""
    texts = context.tokenizer.special_tokens
    return TokenizerInfo(
        **{name: texts[name] for name in TokenizerInfo.__struct_fields__ if name in texts},
        chat_template=context.tokenizer.chat_template or None,
        model_max_length=context.context_length,
    )


def tokenize_text(body: bytes, context: ServerContext) -> TokenizeResponse:
    """Return the response of /tokenize. Raises ApiError."""
    fields = json_object(body)
    if "messages" in fields and "prompt" in fields:
        raise invalid_field("messages", "set either prompt or messages")
    request: TokenizeRequest | TokenizeChatRequest
    is_chat = "messages" in fields
    request = converted(fields, TokenizeChatRequest) if is_chat else converted(fields, TokenizeRequest)
    find_served(request.model, context)
    if isinstance(request, TokenizeChatRequest):
        messages = text_messages(request.messages, context)
        tokens = render_prompt(
            messages,
            context,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
            continues=bool(request.continue_final_message),
        )
    else:
        special = request.add_special_tokens is not False
        tokens = tokenize(request.prompt, context, add_special_tokens=special)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=context.context_length,
        tokens=tokens,
        token_strs=[context.tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None,
    )


def detokenize(body: bytes, context: ServerContext) -> DetokenizeResponse:
    """Return the response of /detokenize. Raises ApiError."""
    request = converted(json_object(body), DetokenizeRequest)
    find_served(request.model, context)
    check_tokens("tokens", tuple(request.tokens), context)
    return DetokenizeResponse(
        prompt=run_tokenizer(lambda: context.tokenizer.decode(request.tokens, skip_special_tokens=False), "tokens")
    )
