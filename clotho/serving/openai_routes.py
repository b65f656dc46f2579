"""The endpoints of the OpenAI API: chat, completions, and the list of models; and the bodies of their responses."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain
from typing import ClassVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from clotho.serving.bodies import json_response
from clotho.serving.chat_extension import MessageDelta, MessageParser, ValidatedRequest
from clotho.serving.errors import ApiError
from clotho.serving.limits import until_disconnect
from clotho.serving.openai_requests import parse_chat_request, parse_completion_request
from clotho.serving.openai_responses import (
    DONE,
    AssistantMessage,
    ChatChoice,
    Choice,
    Chunk,
    CompletionChoice,
    CompletionLogprobs,
    ModelCard,
    ModelList,
    PromptPositions,
    ResponseBody,
    TokenIds,
    TokenIdTexts,
    Usage,
    call_deltas,
    chat_logprobs,
    completion_logprobs,
    last_chunk,
    prompt_positions,
    server_sent,
    weights_versions,
)
from clotho.serving.parts import ServerParts
from clotho.serving.services import ServedModel, ServerContext, Tokenizer, find_served
from protocols.sampling import Completion, PromptLogprobs
from protocols.step import WeightsReady


class ResponseBuilder(ABC):
    """Builds the body of one response, or of all chunks of one stream, which share ID, time and model name.

    id_prefix: of response IDs. whole_object, streamed_object: value of the field `object`.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    streamed_object: ClassVar[str]

    def __init__(
        self,
        request: ValidatedRequest,
        context: ServerContext,
        weights: WeightsReady,
        scored: Sequence[PromptLogprobs] = (),
    ) -> None:
        """weights: version of the request's model when the request arrived.

        scored: log-probabilities of each prompt, if the request has `scored_alternatives`.
        """
        self.request = request
        names = TokenIdTexts(context.tokenizer) if request.return_tokens_as_token_ids else context.tokenizer
        self.tokenizer: Tokenizer = names
        self._weights, self._scored = weights, scored
        self._id = f"{self.id_prefix}-{request.request_id}"
        self._created = int(time.time())

    def whole(self, results: Sequence[Sequence[Completion]]) -> ResponseBody:
        """Return the whole response; choice `i * n + j` is completion j of prompt i."""
        completions = list(chain.from_iterable(results))
        choices = [self._choice(last_chunk(one, index, one.text), whole=True) for index, one in enumerate(completions)]
        return self._body(self.whole_object, choices, self._usage(completions), opening=True)

    def streamed(self, chunk: Chunk, *, opening: bool) -> bytes:
        """Return the event of a chunk, the `opening` one with the prompt; nothing if nothing is final."""
        choice = self._choice(chunk, whole=False)
        if self.request.message_parser is not None and _is_empty(choice):
            return b""
        usage = None if self.request.include_usage else UNSET
        return server_sent(self._body(self.streamed_object, [choice], usage, opening=opening))

    def ending(self, completions: Sequence[Completion]) -> bytes:
        """Return the end of a stream, with `include_usage` behind a last chunk without choices."""
        if not self.request.include_usage:
            return DONE
        return server_sent(self._body(self.streamed_object, [], self._usage(completions), opening=False)) + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed: the error as an event of its own."""
        return server_sent(error.body) + DONE

    @abstractmethod
    def _choice(self, chunk: Chunk, *, whole: bool) -> Choice:
        """Return the choice of a whole response or of a stream."""

    def _prompt_fields(self) -> tuple[TokenIds, PromptPositions]:
        """Return `prompt_token_ids` and `prompt_logprobs` beside the choices."""
        return UNSET, UNSET

    def _positions(self, prompt: int) -> PromptPositions:
        top, tokens = self.request.prompt_logprobs, self.request.prompts[prompt]
        return UNSET if top is None else prompt_positions(tokens, self._scored[prompt], self.tokenizer, top=top)

    def _body(
        self, name: str, choices: Sequence[Choice], usage: Usage | UnsetType | None, *, opening: bool
    ) -> ResponseBody:
        tokens, positions = self._prompt_fields() if opening else (UNSET, UNSET)
        return ResponseBody(
            id=self._id,
            object=name,
            created=self._created,
            model=self.request.model.id,
            choices=choices,
            system_fingerprint=self._weights.fingerprint,
            weights_version=self._weights.version,
            usage=usage,
            prompt_token_ids=tokens,
            prompt_logprobs=positions,
        )

    def _usage(self, completions: Sequence[Completion]) -> Usage:
        prompt, completion = self.request.prompt_tokens, sum(len(one.tokens) for one in completions)
        return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def _is_empty(choice: Choice) -> bool:
    """Whether a streamed choice contains nothing, because the parser of the message holds its text back."""
    is_open = choice.finish_reason is None and choice.logprobs is None and not choice.token_ids
    return is_open and isinstance(choice, ChatChoice) and choice.delta == AssistantMessage()


class CompletionBuilder(ResponseBuilder):
    """Responses of /v1/completions. What describes a prompt is part of its choices."""

    id_prefix, whole_object, streamed_object = "cmpl", "text_completion", "text_completion"

    def _choice(self, chunk: Chunk, *, whole: bool) -> CompletionChoice:
        """Return the choice; whole and streamed choices have the same format."""
        request, prompt = self.request, chunk.index // self.request.n
        echoes = bool(request.echo) and chunk.first
        return CompletionChoice(
            index=chunk.index,
            text=f"{request.echo[prompt]}{chunk.text}" if echoes else chunk.text,
            logprobs=self._logprobs(chunk, prompt, echoes=echoes),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            weights_versions=weights_versions(chunk.versions),
            token_ids=chunk.tokens if request.return_token_ids else UNSET,
            prompt_token_ids=request.prompts[prompt] if request.return_token_ids and chunk.first else UNSET,
            prompt_logprobs=self._positions(prompt),
        )

    def _logprobs(self, chunk: Chunk, prompt: int, *, echoes: bool) -> CompletionLogprobs | None:
        """Return the log-probabilities of a chunk, behind those of its prompt if it repeats the prompt."""
        count, tokens, logprobs, top = self.request.top_logprobs, chunk.tokens, chunk.logprobs, chunk.top_logprobs
        if count is None:
            return None
        if not echoes:
            before = len(self.request.echo[prompt]) if self.request.echo else 0
            return completion_logprobs(tokens, logprobs, top, self.tokenizer, offset=before + chunk.offset)
        scored = self._scored[prompt]
        return completion_logprobs(
            (*self.request.prompts[prompt], *tokens),
            (None, *scored.logprobs, *logprobs),
            ((), *(alternatives[:count] for alternatives in scored.top_logprobs), *(top or ((),) * len(tokens))),
            self.tokenizer,
            offset=0,
        )


class ChatBuilder(ResponseBuilder):
    """Responses of /v1/chat/completions. What describes the conversation is beside the choices."""

    id_prefix, whole_object, streamed_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @cached_property
    def _parsers(self) -> dict[int, MessageParser]:
        """The parser of each choice that has begun."""
        return {}

    def _prompt_fields(self) -> tuple[TokenIds, PromptPositions]:
        return self.request.prompts[0] if self.request.return_token_ids else UNSET, self._positions(0)

    def _choice(self, chunk: Chunk, *, whole: bool) -> ChatChoice:
        """Return the choice; the first chunk of a choice contains the role."""
        message, finish_reason = self._message(chunk, whole=whole), chunk.finish_reason
        parser = self._parsers.get(chunk.index)
        if finish_reason == "stop" and parser is not None and parser.has_calls:
            finish_reason = "tool_calls"
        logprobs = None
        if self.request.top_logprobs is not None:
            logprobs = chat_logprobs(chunk.tokens, chunk.logprobs, chunk.top_logprobs, self.tokenizer)
        return ChatChoice(
            index=chunk.index,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=chunk.stop_reason,
            weights_versions=weights_versions(chunk.versions),
            message=message if whole else UNSET,
            delta=UNSET if whole else message,
            token_ids=chunk.tokens if self.request.return_token_ids else UNSET,
        )

    def _message(self, chunk: Chunk, *, whole: bool) -> AssistantMessage:
        """Return the parts of a message that are final with a chunk."""
        delta = MessageDelta(content=chunk.text)
        if self.request.message_parser is not None:
            parser = self._parsers.setdefault(chunk.index, self.request.message_parser())
            delta = parser.push(chunk.text, last=chunk.finish_reason is not None)
        content: str | UnsetType | None = delta.content or ("" if chunk.first else UNSET)
        if whole and not delta.content and (delta.calls or delta.reasoning):
            content = None
        if self.request.echo and chunk.first:
            content = f"{self.request.echo[0]}{content or ''}"
        return AssistantMessage(
            role="assistant" if chunk.first else UNSET,
            content=content,
            reasoning_content=delta.reasoning or UNSET,
            tool_calls=call_deltas(delta.calls, whole=whole) if delta.calls else UNSET,
        )


class OpenaiRoutes:
    """The routes of one server."""

    def __init__(self, parts: ServerParts, started: int) -> None:
        """started: the time at which the server was started, in seconds since 1970."""
        self._parts, self._context, self._started = parts, parts.context, started

    async def chat_completions(self, http: Request) -> Response:
        """Answer a conversation."""
        build = partial(self._builder, http, ChatBuilder)
        return await self._parts.answering.answer(http, parse_chat_request, build)

    async def completions(self, http: Request) -> Response:
        """Complete prompts."""
        build = partial(self._builder, http, CompletionBuilder)
        return await self._parts.answering.answer(http, parse_completion_request, build)

    async def _builder(
        self, http: Request, kind: type[ResponseBuilder], request: ValidatedRequest, weights: WeightsReady
    ) -> ResponseBuilder:
        """Return the builder of the response. If the response contains scores of prompts, compute them first."""
        top = request.scored_alternatives
        if top is None:
            return kind(request, self._context, weights)
        scored = await until_disconnect(http.receive, self._parts.answering.scores(http, request, top))
        return kind(request, self._context, weights, scored)

    async def models(self, _: Request) -> Response:
        """List the served models."""
        cards = [self._card(model) for model in self._context.models()]
        return json_response(ModelList(data=cards), self._context.weights().version)

    async def model(self, http: Request) -> Response:
        """Describe one served model. Raises ApiError if there is none of this name."""
        card = self._card(find_served(http.path_params["name"], self._context))
        return json_response(card, card.weights_version)

    def _card(self, model: ServedModel) -> ModelCard:
        return ModelCard(
            id=model.id,
            root=model.root,
            parent=model.parent,
            created=self._started,
            max_model_len=self._context.context_length,
            weights_version=model.weights().version,
        )
