"""The endpoints for training runs that sample their rollouts on this server.

`GET /v1/policy` returns what the server samples from, `PUT /v1/policy/weights` replaces the weights, and
`POST /v1/rollouts` returns the completions of one group with log-probabilities, policy versions and supports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from attachments.remote.messages import (
    FILE_HEADER,
    FINGERPRINT_HEADER,
    RUN_HEADER,
    STEP_HEADER,
    VERSION_HEADER,
    RolloutAnswer,
    RolloutCall,
)
from attachments.remote.sections import WEIGHTS_ROOT
from clotho.serving.bodies import declares_more, json_object, json_response
from clotho.serving.chat_extension import ValidatedRequest
from clotho.serving.errors import ApiError, invalid_field, overloaded
from clotho.serving.limits import until_disconnect
from clotho.serving.openai_requests import converted
from clotho.serving.parts import ServerParts
from clotho.serving.services import ServerContext
from protocols.errors import CheckpointError
from protocols.step import WeightsReady

if TYPE_CHECKING:
    from attachments.remote.policy_receiver import SwappingReceiver

MAX_NAME = 64
"""Maximum length of a fingerprint and of the name of a run."""


def parse_rollout_call(body: bytes, context: ServerContext) -> ValidatedRequest:
    """Parse the body of /v1/rollouts. Raises ApiError with status 400 that names the invalid field."""
    call = converted(json_object(body), RolloutCall)
    if not 1 <= len(call.seeds) <= context.settings.max_choices:
        raise invalid_field("seeds", f"must have 1 to {context.settings.max_choices} entries (server.max_choices)")
    request = call.request()
    return ValidatedRequest(
        model=context.models()[0],
        prompts=(request.prompt,),
        samples=(request,),
        n=len(request.seeds),
        top_logprobs=None,
        stream=False,
        include_usage=False,
        return_token_ids=True,
    )


class PolicyRoutes:
    """The routes of the served policy. Weights are received and served one at a time, so that one body is in memory.

    receiver: replaces the weights; None on a server that accepts none.
    """

    def __init__(self, parts: ServerParts, receiver: SwappingReceiver | None, seconds: float) -> None:
        """seconds: longest time without further bytes of a body."""
        self._parts, self.receiver, self._seconds = parts, receiver, seconds
        self._receiving = False

    async def rollouts(self, http: Request) -> Response:
        """Respond with the completions of one group."""
        answering, context = self._parts.answering, self._parts.context
        request = await answering.parsed(parse_rollout_call, http)
        request, sampler = await answering.recorded(http, request)
        weights, finished = context.weights(), answering.counted(request)
        (completions,) = await until_disconnect(http.receive, sampler.complete_all(request.samples))
        finished(completions)
        versions = {version for completion in completions for version in completion.versions}
        fingerprint_of = self.receiver.fingerprint if self.receiver is not None else lambda _: ""
        fingerprints = {version: fingerprint_of(version) for version in versions}
        return json_response(RolloutAnswer(completions=tuple(completions), fingerprints=fingerprints), weights.version)

    async def get(self, _: Request) -> Response:
        """Respond with the served policy."""
        return Response(msgspec.json.encode(self._accepting().served()), media_type="application/json")

    def _accepting(self) -> SwappingReceiver:
        if self.receiver is None:
            raise ApiError(403, "this server does not accept weights; start it with --server.accept-weights true")
        return self.receiver

    async def put(self, http: Request) -> Response:
        """Serve the weights in the body, or in the file that a header names. Responds with the served policy.

        Responds with status 503 before it reads the body if other weights are being received or served.
        """
        receiver = self._accepting()
        ready = WeightsReady(
            version=_number(http, VERSION_HEADER), step=_number(http, STEP_HEADER), fingerprint=_name(http)
        )
        if self._receiving:
            raise overloaded("Other weights are being received; retry later.")
        self._receiving = True
        try:
            return await self._receive(http, receiver, ready)
        except CheckpointError as error:
            raise ApiError(400, f"The weights cannot be served: {error}", code="invalid_weights") from error
        finally:
            self._receiving = False

    async def _receive(self, http: Request, receiver: SwappingReceiver, ready: WeightsReady) -> Response:
        file, run_id = http.headers.get(FILE_HEADER), http.headers.get(RUN_HEADER, "")[:MAX_NAME]
        if file is not None:
            tensors = await receiver.read(file)
        else:
            tensors = await read_bytes(http, receiver.max_bytes, self._seconds)
        served = await receiver.receive(tensors, ready, run_id=run_id)
        return Response(msgspec.json.encode(served), media_type="application/json")


def routes_of(parts: ServerParts) -> PolicyRoutes:
    """Return the routes of a server. They refuse weights if nobody may replace those of its policy."""
    receiver: SwappingReceiver | None = None
    if (replaceable := parts.offered.replaceable) is not None:
        from attachments.remote.policy_receiver import SwappingReceiver

        receiver = SwappingReceiver(replaceable, root=WEIGHTS_ROOT.of(parts.offered.settings))
    return PolicyRoutes(parts, receiver, parts.bodies.seconds)


async def read_bytes(http: Request, max_bytes: int, seconds: float) -> bytes:
    """Return the body of a request. seconds: longest time without further bytes.

    Raises ApiError with status 413 for a larger body, 408 if no bytes arrive, and ClientDisconnect.
    """
    too_large = ApiError(413, f"The weights are larger than {max_bytes} bytes.", code="body_too_large")
    if declares_more(http.headers, max_bytes):
        raise too_large
    chunks, size, more = list[bytes](), 0, True
    try:
        while more:
            chunk, more = await _next_chunk(http, seconds)
            chunks.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                raise too_large
        return b"".join(chunks)
    finally:
        chunks.clear()  # the traceback of an exception keeps this frame


async def _next_chunk(http: Request, seconds: float) -> tuple[bytes, bool]:
    """Return the next bytes of a body, and whether more follow. Raises ApiError and ClientDisconnect."""
    with anyio.move_on_after(seconds) as waiting:
        message = await http.receive()
    if waiting.cancelled_caught:
        raise ApiError(408, f"No more of the weights arrived within {seconds:g} seconds.", code="body_timeout")
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


def _number(http: Request, header: str) -> int:
    text = http.headers.get(header, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise ApiError(400, f"The header {header} must be a number.", param=header)
    return int(text)


def _name(http: Request) -> str:
    text = http.headers.get(FINGERPRINT_HEADER, "")
    if not 1 <= len(text) <= MAX_NAME or not text.isalnum():
        raise ApiError(400, f"The header {FINGERPRINT_HEADER} must be a fingerprint.", param=FINGERPRINT_HEADER)
    return text
