"""A fake Atropos API server; `test_api_contract.py` checks that it behaves as the real server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

State = dict[str, Any]
FIELDS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
)  # fmt: skip


class FakeApi(httpx.AsyncBaseTransport):
    """The server and its network. away: exception that every request raises while it is set.

    asked: all requests, as "METHOD /path". instead: path -> responses that replace the server's, each once.
    """

    def __init__(self) -> None:
        self.away: Exception | None = None
        self.asked: list[str] = []
        self.registered: list[State] = []
        self.instead: dict[str, list[Response]] = {}
        self.restart()

    def restart(self) -> None:
        """Clear the state, as a restarted process."""
        self.state: State = {}
        app = Starlette(
            routes=[
                Route("/register", self._register, methods=["POST"]),
                Route("/register-env", self._register_env, methods=["POST"]),
                Route("/info", self._info),
                Route("/batch", self._batch),
                Route("/scored_data", self._scored_data, methods=["POST"]),
                Route("/status", self._status),
                Route("/status-env", self._status_env),
                Route("/reset_data", self._reset),
            ],
            middleware=[Middleware(GZipMiddleware, minimum_size=1000)],
        )
        self._network = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Respond, or raise `away`."""
        self.asked.append(f"{request.method} {request.url.path}")
        if self.away is not None:
            raise self.away
        if answers := self.instead.get(request.url.path):
            return await httpx.ASGITransport(answers.pop(0)).handle_async_request(request)
        return await self._network.handle_async_request(request)

    async def _register(self, request: Request) -> Response:
        fields = await request.json()
        if "queue" not in self.state:
            self.state |= {"queue": [], "ready": [], "started": False, "envs": []}
            self.state |= {"batch_size": fields["batch_size"], "max_token_len": fields["max_token_len"]}
            self.state["step"] = fields["starting_step"]
        self.registered.append(fields)
        return JSONResponse({"uuid": 2**100})

    async def _register_env(self, request: Request) -> Response:
        if not self.state.get("started"):
            return JSONResponse({"status": "wait for trainer to start"})
        self.state["envs"].append(await request.json())
        return JSONResponse({"status": "success", "env_id": len(self.state["envs"]) - 1})

    async def _info(self, _: Request) -> Response:
        if "batch_size" not in self.state:
            return JSONResponse({"batch_size": -1, "max_token_len": -1})
        return JSONResponse({name: self.state[name] for name in ("batch_size", "max_token_len")})

    async def _batch(self, _: Request) -> Response:
        state = self.state
        if "started" not in state:
            message = "Trainer not registered. Call /register first."
            return JSONResponse({"status": "error", "message": message, "batch": []})
        state["started"] = True
        senders = {group["env_id"] for group in state["queue"]}
        reserved = {i for i, one in enumerate(state["envs"]) if one.get("min_batch_allocation")}
        if not state["ready"] and reserved <= senders:
            while (batch := _first_groups(state["queue"], state["batch_size"])) is not None:
                state["queue"] = state["queue"][len(batch) :]
                state["ready"].append(batch)
                state["step"] += 1
        return JSONResponse({"batch": state["ready"].pop() if state["ready"] else None})

    async def _scored_data(self, request: Request) -> Response:
        fields = json.loads(await request.body())
        self.state.setdefault("queue", []).append({name: fields.get(name) for name in FIELDS})
        return JSONResponse({"status": "received"})

    async def _status(self, _: Request) -> Response:
        return JSONResponse({"current_step": self.state.get("step", 0), "queue_size": len(self.state.get("queue", []))})

    async def _status_env(self, request: Request) -> Response:
        env_id = (await request.json())["env_id"]
        environment, queue = self.state["envs"][env_id], self.state["queue"]
        own = sum(len(group["tokens"]) for group in queue if group["env_id"] == env_id)
        reserved = sum(one.get("min_batch_allocation") or 0.0 for one in self.state["envs"])
        answer = {"current_step": self.state["step"], "queue_size": len(queue), "env_weight": 1.0}
        answer["unallocated_fraction"] = 1.0 - min(reserved, 1.0)
        answer["self_queue_size"] = own // environment["group_size"]
        answer["max_group_size"] = max([1, *(len(group["tokens"]) for group in queue)])
        return JSONResponse(answer)

    async def _reset(self, _: Request) -> Response:
        if "queue" in self.state:
            self.state = {"max_token_len": self.state.get("max_token_len", -1), "batch_size": -1}
            self.state |= {"ready": [], "started": False, "envs": [], "step": 0}
        return PlainTextResponse("Reset successful")


def _first_groups(queue: list[State], batch_size: int) -> list[State] | None:
    """Return the oldest groups if they contain exactly one batch of sequences."""
    count, batch = 0, list[State]()
    for group in queue if batch_size > 0 else ():
        batch.append(group)
        count += len(group["tokens"])
        if count >= batch_size:
            return batch if count == batch_size else None
    return None


def truncated(content: bytes, encoding: str) -> Response:
    """Return a response whose body is truncated."""
    return Response(content[: len(content) // 2], headers={"content-encoding": encoding}, media_type="application/json")


def endless(content: bytes, times: int) -> Response:
    """Return a response whose body consists of `times` parts."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(times):
            yield content

    return StreamingResponse(parts(), media_type="application/json")
