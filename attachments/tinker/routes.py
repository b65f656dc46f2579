"""The routes of Tinker's API that sample and train. Answers about what is saved are in `routes_rest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from attachments.tinker import bodies
from attachments.tinker.sections import TinkerApi
from attachments.tinker.service import TinkerService
from attachments.tinker.wire import JSON, PROTOBUF, encoded, read_forward_backward
from clotho.sampler import BaseAccess
from clotho.serving.auth import client_of
from clotho.serving.bodies import json_object
from clotho.serving.errors import ApiError
from clotho.serving.openai_requests import converted
from clotho.serving.parts import ServerParts

Body = TypeVar("Body", bound=Struct)

POLL_SECONDS = 20.0
"""How long an answer of retrieve_future waits for a result. The SDK waits for 45 seconds."""

CHUNK_SHARE = 0.75
"""Share of `server.max_body_bytes` that the SDK fills with data; it estimates the size of a body."""


def answer(body: Struct, status: int = 200) -> Response:
    """Return a body as JSON."""
    return Response(msgspec.json.encode(body), status_code=status, media_type=JSON)


class Routes:
    """What all routes of a server share."""

    def __init__(self, parts: ServerParts, service: TinkerService) -> None:
        self._parts, self.service = parts, service

    async def body(self, http: Request, kind: type[Body]) -> Body:
        """Read the body of a request."""
        async with self._parts.bodies.read(http.scope, http.receive) as content:
            return converted(json_object(content or b"{}"), kind)


PROMISED: Mapping[str, tuple[type[Struct], Callable[..., bodies.Promise]]] = {
    "asample": (bodies.SampleCall, TinkerService.sample),
    "create_model": (bodies.CreateModel, TinkerService.create_model),
    "load_weights": (bodies.LoadWeights, TinkerService.load),
    "optim_step": (bodies.OptimStep, TinkerService.optim_step),
    "save_weights": (bodies.SaveWeights, TinkerService.save),
    "save_weights_for_sampler": (bodies.SaveForSampler, TinkerService.save_for_sampler),
    "unload_model": (bodies.ModelCall, TinkerService.unload),
}
"""Routes whose answer is a promise: the body of the request, and what begins the work."""


class TinkerRoutes(Routes):
    """The routes of one server."""

    def __init__(self, parts: ServerParts, access: BaseAccess, settings: TinkerApi) -> None:
        super().__init__(parts, TinkerService(access, parts.context, settings))

    async def constant(self, http: Request, *, content: bytes) -> Response:
        """Serve a route with one answer. A body is read, and not kept."""
        await self.body(http, bodies.Empty)
        return Response(content, media_type=JSON)

    async def promised(self, http: Request, *, route: str) -> Response:
        """Answer with the promise of a request, which counts in the quota of the client."""
        kind, begin = PROMISED[route]
        call, client = await self.body(http, kind), client_of(http.scope)
        with client.request():
            return answer(begin(self.service, call, client))

    async def config(self, http: Request) -> Response:
        """Serve POST client/config."""
        await self.body(http, bodies.Empty)
        settings = self._parts.context.settings
        found = bodies.ClientConfig(
            fwdbwd_max_chunk_bytes_count=int(CHUNK_SHARE * settings.max_body_bytes),
            sample_max_concurrent_requests=self.service.settings.max_pending,
        )
        return answer(found)

    async def capabilities(self, _: Request) -> Response:
        """Serve GET get_server_capabilities."""
        length = self._parts.context.context_length
        found = [bodies.SupportedModel(model_name=name, max_context_length=length) for name in self.service.names]
        return answer(bodies.Capabilities(supported_models=found))

    async def create_session(self, http: Request) -> Response:
        """Serve POST create_session."""
        session = self.service.sessions.create(client_of(http.scope), await self.body(http, bodies.CreateSession))
        return answer(bodies.SessionCreated(session_id=session.session_id))

    async def heartbeat(self, http: Request) -> Response:
        """Serve POST session_heartbeat; 410 ends the client's heartbeats."""
        call = await self.body(http, bodies.SessionCall)
        self.service.sessions.get(call.session_id, client_of(http.scope))
        return Response(b'{"type":"session_heartbeat"}', media_type=JSON)

    async def finish(self, http: Request) -> Response:
        """Serve POST sessions/{id}/finish."""
        await self.body(http, bodies.Empty)
        sessions = self.service.sessions
        sessions.end(sessions.get(http.path_params["session_id"], client_of(http.scope)), "its client has finished it")
        return answer(bodies.Empty())

    async def get_info(self, http: Request) -> Response:
        """Serve POST get_info."""
        call = await self.body(http, bodies.ModelCall)
        _, model = self.service.sessions.of_model(call.model_id, client_of(http.scope))
        base = self.service.access.base
        name = self.service.store.run(call.model_id, "").base_model
        data = bodies.ModelData(
            arch=base.description.architecture, model_name=name, tokenizer_id=str(base.files or name)
        )
        return answer(
            bodies.ModelInfo(model_id=call.model_id, model_data=data, model_name=name, lora_rank=model.lora.rank)
        )

    async def forward_backward(self, http: Request, *, forward_only: bool = False) -> Response:
        """Serve POST forward_backward and POST forward."""
        media_type, client = http.headers.get("content-type", ""), client_of(http.scope)
        async with self._parts.bodies.read(http.scope, http.receive, binary=PROTOBUF) as content:
            call, number = read_forward_backward(content, media_type, forward_only=forward_only)
        with client.request():
            return answer(self.service.forward_backward(call, number, client))

    async def create_sampling_session(self, http: Request) -> Response:
        """Serve POST create_sampling_session."""
        call = await self.body(http, bodies.CreateSamplingSession)
        found = self.service.create_sampler(call, client_of(http.scope))
        return answer(bodies.SamplingSession(sampling_session_id=found.sampler_id))

    async def sampler(self, http: Request) -> Response:
        """Serve GET samplers/{id}."""
        found = self.service.samplers.get(http.path_params["sampler_id"], client_of(http.scope))
        return answer(
            bodies.SamplerInfo(sampler_id=found.sampler_id, base_model=found.base_model, model_path=found.path or None)
        )

    async def retrieve(self, http: Request) -> Response:
        """Serve POST retrieve_future: the result, or 408 if there is none yet."""
        call, sessions = await self.body(http, bodies.RetrieveFuture), self.service.sessions
        pending = sessions.pending(call.request_id, client_of(http.scope))
        result = await pending.within(POLL_SECONDS)
        if result is None:
            return answer(bodies.TryAgain(request_id=call.request_id), status=408)
        content, media_type = encoded(result, binary=PROTOBUF in http.headers.get("accept", ""))
        sessions.was_read(call.request_id)
        return Response(content, media_type=media_type)

    async def cancel(self, http: Request) -> Response:
        """Serve POST cancel_future."""
        call = await self.body(http, bodies.RetrieveFuture)
        self.service.sessions.cancel(call.request_id, client_of(http.scope))
        return answer(bodies.Empty())

    async def refused(self, _: Request, *, advice: str) -> Response:
        """Refuse a route of Tinker that is not served."""
        raise ApiError(400, advice, code="not_served")
