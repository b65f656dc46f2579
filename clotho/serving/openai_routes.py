"""The endpoints of the OpenAI API: chat, completions, and the list of models."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from clotho.serving.completion_requests import parse_completion_request
from clotho.serving.limits import until_disconnect
from clotho.serving.openai_requests import ValidatedRequest, parse_chat_request
from clotho.serving.openai_responses import ModelCard, ModelList
from clotho.serving.parts import ServerParts, json_response
from clotho.serving.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder
from clotho.serving.services import ServedModel, find_served
from protocols.step import WeightsReady


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
