"""The endpoints for training runs of other processes: weights are checked completely before anything changes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import mlx.core as mx
import pytest
from starlette.requests import Request
from starlette.types import Message

from attachments.remote.messages import FINGERPRINT_HEADER, STEP_HEADER, VERSION_HEADER
from attachments.remote.routes import PolicyRoutes
from attachments.remote.tests.inference_server import InferenceServer, servers
from clotho.serving.errors import ApiError
from clotho.storage.tensors import named_arrays, tensor_bytes

Arrays = dict[str, mx.array]


def headers(fingerprint: str, **changes: str) -> dict[str, str]:
    """Return the headers of weights."""
    return {VERSION_HEADER: "3", STEP_HEADER: "3", FINGERPRINT_HEADER: fingerprint} | changes


async def put(server: InferenceServer, body: bytes, fields: dict[str, str]) -> httpx.Response:
    """Send weights."""
    async with httpx.AsyncClient(base_url="http://127.0.0.1:8000", transport=server.connection) as client:
        return await client.put("/v1/policy/weights", content=body, headers=fields)


def renamed(arrays: Arrays) -> Arrays:
    """Rename the first array."""
    first = next(iter(arrays))
    return {f"{name}.other" if name == first else name: array for name, array in arrays.items()}


def changed(change: Callable[[mx.array], mx.array]) -> Callable[[Arrays], Arrays]:
    """Return a function that changes the first array."""

    def apply(arrays: Arrays) -> Arrays:
        first = next(iter(arrays))
        found = arrays | {first: change(arrays[first])}
        mx.eval(found)
        return found

    return apply


WRONG: dict[str, Callable[[Arrays], Arrays]] = {
    "another name": renamed,
    "a missing array": lambda arrays: dict(list(arrays.items())[1:]),
    "another shape": changed(lambda array: array[:1]),
    "another type": changed(lambda array: array.astype(mx.float16)),
    "a NaN": changed(lambda array: array * float("nan")),
    "other values": changed(lambda array: array + 1.0),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_wrong_weights_change_nothing(tmp_path: Path, wrong: Callable[[Arrays], Arrays]) -> None:
    """Status 400; version and weights stay."""
    with servers(tmp_path, 1) as [server]:
        before = server.policy.fingerprint
        parameters, digest = server.moved(0.5)
        body = server.compute.decode.submit(lambda: tensor_bytes(wrong(named_arrays(parameters)))).result()
        response = await put(server, body, headers(digest))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_weights"
        assert (server.policy.version, server.policy.fingerprint, server.weights.value.version) == (0, before, 0)
        assert server.receiver.fingerprint(3) == ""


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff" * 8, b"\x00" * 100, b"\x08\0\0\0\0\0\0\0{}      "])
async def test_bytes_that_are_no_weights_are_refused(tmp_path: Path, body: bytes) -> None:
    """Status 400."""
    with servers(tmp_path, 1) as [server]:
        assert (await put(server, body, headers("f"))).status_code == 400


async def test_weights_above_the_size_of_the_policy_are_refused(tmp_path: Path) -> None:
    """Status 413, before the body is complete."""
    with servers(tmp_path, 1) as [server]:
        response = await put(server, b"x" * (server.receiver.max_bytes + 1), headers("f"))
        assert response.status_code == 413


class Stalled:
    """A request with weights of which some parts arrive, and the rest never. reads: how often the server read it."""

    def __init__(self, parts: int = 1, fields: dict[str, str] | None = None) -> None:
        raw = [(name.encode(), value.encode()) for name, value in (headers("f") | (fields or {})).items()]
        scope = {"type": "http", "method": "PUT", "path": "/v1/policy/weights", "headers": raw}
        self.http, self.parts = Request(scope, self.receive), parts
        self.reads, self.waiting = 0, anyio.Event()

    async def receive(self) -> Message:
        """Return the parts, then nothing."""
        self.reads += 1
        if self.reads > self.parts:
            self.waiting.set()
            await anyio.sleep_forever()
        return {"type": "http.request", "body": b"x" * 10_000, "more_body": True}


async def refusal(routes: PolicyRoutes, request: Stalled) -> ApiError:
    """Return the error that ends a request."""
    with pytest.raises(ApiError) as caught:
        await routes.put(request.http)
    return caught.value.with_traceback(None)


async def test_one_body_of_weights_is_received_at_a_time(tmp_path: Path) -> None:
    """Further ones receive status 503 with Retry-After before they are read. A client that hangs up frees the place."""
    with servers(tmp_path, 1) as [server]:
        routes, first, second = PolicyRoutes(server.parts, server.receiver, 30.0), Stalled(), Stalled()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(routes.put, first.http)
            await first.waiting.wait()
            for _ in range(20):
                refused = await refusal(routes, other := Stalled())
                assert (refused.status, other.reads) == (503, 0)
                assert refused.headers["retry-after"]
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(routes.put, second.http)
            await second.waiting.wait()
            tasks.cancel_scope.cancel()


async def test_weights_that_stop_to_arrive_are_dropped(tmp_path: Path) -> None:
    """Status 408 after `server.body_seconds` without a byte. Their memory is free again, and so is the place."""
    with ExitStack() as stack:
        server = InferenceServer(stack, tmp_path)
        routes = PolicyRoutes(server.parts, server.receiver, 0.01)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for _ in range(3):
            refused = await refusal(routes, Stalled(100))
            assert (refused.status, refused.body.error.code) == (408, "body_timeout")
        assert tracemalloc.get_traced_memory()[0] < 500_000


async def test_a_declared_size_above_the_limit_is_refused_before_the_body(tmp_path: Path) -> None:
    """Status 413."""
    with servers(tmp_path, 1) as [server]:
        request = Stalled(fields={"content-length": str(server.receiver.max_bytes + 1)})
        assert (await refusal(PolicyRoutes(server.parts, server.receiver, 30.0), request)).status == 413
        assert request.reads == 0


@pytest.mark.parametrize(
    ("header", "value"),
    [(VERSION_HEADER, ""), (VERSION_HEADER, "-1"), (VERSION_HEADER, "9" * 30), (STEP_HEADER, "x"),
     (FINGERPRINT_HEADER, ""), (FINGERPRINT_HEADER, "a" * 65), (FINGERPRINT_HEADER, "a/b")],
)  # fmt: skip
async def test_an_invalid_header_is_named(tmp_path: Path, header: str, value: str) -> None:
    """Status 400."""
    with servers(tmp_path, 1) as [server]:
        response = await put(server, b"", headers("f", **{header: value}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, header)


async def test_a_server_that_does_not_accept_weights_refuses_them(tmp_path: Path) -> None:
    """Status 403."""
    with ExitStack() as stack:
        server = InferenceServer(stack, tmp_path, accepts_weights=False)
        assert (await put(server, b"", headers("f"))).status_code == 403


@pytest.mark.parametrize(
    ("change", "param"),
    [({"seeds": []}, "seeds"), ({"seeds": [1] * 65}, "seeds"), ({"prompt": "text"}, "prompt"), ({"extra": 1}, "extra"),
     ({"sampling": {"temperature": -1}}, "sampling"), ({"seeds": ["a"]}, "seeds")],
)  # fmt: skip
async def test_an_invalid_request_for_rollouts_names_the_field(
    tmp_path: Path, change: dict[str, Any], param: str
) -> None:
    """Status 400."""
    with servers(tmp_path, 1) as [server]:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8000", transport=server.connection) as client:
            fields = {"prompt": [5, 9], "sampling": {"max_tokens": 2}, "seeds": [1]} | change
            response = await client.post("/v1/rollouts", json=fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
