"""What a server answers while its model is loaded."""

from __future__ import annotations

import anyio
import httpx
import pytest

from clotho.lanes.sampling_client import EngineSampler
from clotho.serving.server import ApiServer, base_url, listen
from clotho.settings.server import HttpServer
from protocols.errors import ModelError
from tests.fakes import FakeEngine
from tests.serving.running_server import Served, server_context
from training_run.start.loading_server import while_loading


async def test_while_the_model_is_loaded_every_request_is_told_to_retry() -> None:
    """Status 503 with `Retry-After`, at once and on all paths. Then the same socket serves."""
    settings = HttpServer(port=0)
    listener = listen(settings)
    answers: list[httpx.Response] = []

    async def load() -> str:
        async with httpx.AsyncClient(base_url=base_url(listener)) as http:
            answers.append(await http.get("/health"))
            answers.append(await http.post("/v1/chat/completions", json={"messages": ["x" * 100_000]}))
            answers.append(await http.get("/metrics"))
        return "loaded"

    with anyio.fail_after(30):
        assert await while_loading(listener, settings, load()) == "loaded"
    assert {answer.status_code for answer in answers} == {503}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
    assert answers[0].json()["status"] == "loading"
    assert {answer.json()["error"]["code"] for answer in answers[1:]} == {"loading"}
    engine = FakeEngine()
    served = Served(engine, EngineSampler(engine.submit_call, engine))
    server = ApiServer(server_context(served), listener=listener)
    async with anyio.create_task_group() as tasks, httpx.AsyncClient(base_url=base_url(listener)) as http:
        await tasks.start(server.run)
        assert (await http.get("/health")).status_code == 200
        tasks.cancel_scope.cancel()
    engine.close()


async def test_a_model_that_cannot_be_loaded_ends_the_answers_with_its_error() -> None:
    """The error is the one of the model, and the port is free."""
    settings = HttpServer(port=0)

    async def fail() -> None:
        raise ModelError("damaged")

    with listen(settings) as listener, anyio.fail_after(30):
        port = listener.getsockname()[1]
        with pytest.raises(ModelError):
            await while_loading(listener, settings, fail())
    listen(HttpServer(port=port)).close()
