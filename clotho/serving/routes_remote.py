"""The endpoints for training runs that sample their rollouts on this server.

`GET /v1/policy` returns what the server samples from, `PUT /v1/policy/weights` replaces the weights, and
`POST /v1/rollouts` returns the completions of one group with log-probabilities, policy versions and supports.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from clotho.serving.bodies import json_object
from clotho.serving.errors import ApiError, invalid_field
from clotho.serving.openai_requests import ValidatedRequest, validation_error
from clotho.serving.services import ServerContext
from protocols.errors import CheckpointError
from protocols.remote import (
    FILE_HEADER,
    FINGERPRINT_HEADER,
    RUN_HEADER,
    STEP_HEADER,
    VERSION_HEADER,
    RolloutAnswer,
    RolloutCall,
    ServedPolicy,
)
from protocols.sampling import Completion
from protocols.step import WeightsReady

MAX_NAME = 64
"""Maximum length of a fingerprint and of the name of a run."""


def parse_rollout_call(body: bytes, context: ServerContext) -> ValidatedRequest:
    """Parse the body of /v1/rollouts. Raises ApiError with status 400 that names the invalid field."""
    try:
        call = msgspec.convert(json_object(body), RolloutCall)
    except msgspec.ValidationError as error:
        raise validation_error(error) from error
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


def rollout_answer(completions: tuple[Completion, ...], context: ServerContext) -> RolloutAnswer:
    """Return the response body of /v1/rollouts."""
    versions = sorted({version for completion in completions for version in completion.versions})
    return RolloutAnswer(
        completions=completions, fingerprints={version: context.receiver.fingerprint(version) for version in versions}
    )


async def get_policy(context: ServerContext) -> Response:
    """Respond with the served policy."""
    return Response(msgspec.json.encode(_served(context)), media_type="application/json")


def _served(context: ServerContext) -> ServedPolicy:
    try:
        return context.receiver.served()
    except CheckpointError as error:
        raise ApiError(403, str(error)) from error


async def put_policy(http: Request, context: ServerContext) -> Response:
    """Serve the weights in the body, or in the file that a header names. Responds with the served policy."""
    _served(context)
    ready = WeightsReady(
        version=_number(http, VERSION_HEADER), step=_number(http, STEP_HEADER), fingerprint=_name(http)
    )
    file = http.headers.get(FILE_HEADER)
    tensors = await _body(http, context.receiver.max_bytes) if file is None else b""
    try:
        if file is not None:
            tensors = await context.receiver.read(file)
        served = await context.receiver.receive(tensors, ready, run_id=http.headers.get(RUN_HEADER, "")[:MAX_NAME])
    except CheckpointError as error:
        raise ApiError(400, f"The weights cannot be served: {error}", code="invalid_weights") from error
    return Response(msgspec.json.encode(served), media_type="application/json")


async def _body(http: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > max_bytes:
            raise ApiError(413, f"The weights are larger than {max_bytes} bytes.", code="body_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


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
