"""The routes of the dialects that sample or tokenize: the steps from a request to its answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from msgspec import Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from attachments.dialects.messages_format import MessagesBuilder
from attachments.dialects.messages_requests import MessagesRequest, count_tokens, parse_messages_request
from attachments.dialects.native import GenerationResult, NativeRequest
from attachments.dialects.responses_format import ResponsesBuilder
from attachments.dialects.responses_requests import ResponsesRequest, parse_responses_request
from attachments.dialects.routes_generate import parse_generate_request, parse_trl_request
from attachments.dialects.routes_tokenize import detokenize, tokenize_text, tokenizer_info
from attachments.dialects.routes_tokens import parse_tokens_request
from clotho.serving.bodies import json_response
from clotho.serving.limits import until_disconnect
from clotho.serving.parts import ServerParts
from clotho.serving.services import ClientSampler, ServerContext
from protocols.step import WeightsReady


class DialectRoutes:
    """The routes of one server that sample or tokenize."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts

    async def responses(self, http: Request) -> Response:
        """Serve POST /v1/responses."""

        async def build(request: ResponsesRequest, weights: WeightsReady) -> ResponsesBuilder:
            return ResponsesBuilder(request, self._parts.context.tokenizer, weights)

        return await self._parts.answering.answer(http, parse_responses_request, build)

    async def messages(self, http: Request) -> Response:
        """Serve POST /v1/messages."""

        async def build(request: MessagesRequest, weights: WeightsReady) -> MessagesBuilder:
            return MessagesBuilder(request, self._parts.context.tokenizer, weights)

        return await self._parts.answering.answer(http, parse_messages_request, build)

    async def count_tokens(self, http: Request) -> Response:
        """Serve POST /v1/messages/count_tokens."""
        return await self._text(count_tokens, http)

    async def generate(self, http: Request) -> Response:
        """Serve POST /generate."""
        return await self._native(parse_generate_request, http)

    async def generate_many(self, http: Request) -> Response:
        """Serve POST /v1/generate."""
        return await self._native(parse_trl_request, http)

    async def generate_tokens(self, http: Request) -> Response:
        """Serve POST /inference/v1/generate."""
        return await self._native(parse_tokens_request, http)

    async def tokenize(self, http: Request) -> Response:
        """Serve POST /tokenize."""
        return await self._text(tokenize_text, http)

    async def detokenize(self, http: Request) -> Response:
        """Serve POST /detokenize."""
        return await self._text(detokenize, http)

    async def tokenizer_info(self, http: Request) -> Response:
        """Serve GET /tokenizer_info."""
        return json_response(tokenizer_info(self._parts.context), self._parts.context.weights().version)

    async def _native(self, parser: Callable[[bytes, ServerContext], NativeRequest], http: Request) -> Response:
        """Serve an endpoint whose responses are whole."""
        answering = self._parts.answering
        native = await answering.parsed(parser, http)
        request, sampler = await answering.recorded(http, await answering.compiled(native.request))
        native = structs.replace(native, request=request)
        weights, finished = native.request.model.weights(), answering.counted(native.request)
        result = await until_disconnect(http.receive, self._result(http, sampler, native, weights))
        body = native.respond(result)
        finished(result.completions)
        return json_response(body, weights.version, headers=sampler.headers)

    async def _result(
        self, http: Request, sampler: ClientSampler, native: NativeRequest, weights: WeightsReady
    ) -> GenerationResult:
        """Complete the prompts, then score the prompt if requested.

        The prompt is scored last, so that a request that the engine rejects costs no forward pass.
        """
        answering = self._parts.answering
        results = await sampler.complete_all(native.request.samples)
        prompt = None
        if native.prompt_logprobs is not None:
            (prompt,) = await answering.scores(http, native.request, native.prompt_logprobs)
        completions = tuple(chain.from_iterable(results))
        return GenerationResult(model=native.request.model.id, completions=completions, weights=weights, prompt=prompt)

    async def _text(self, work: Callable[[bytes, ServerContext], Struct], http: Request) -> Response:
        """Serve an endpoint that samples nothing."""
        body = await self._parts.answering.parsed(work, http)
        return json_response(body, self._parts.context.weights().version)
