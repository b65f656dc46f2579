"""The dashboard on the server of a run: beside the API, while the model is loaded, and at the end of the run."""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from attachments.dashboard import routes
from attachments.dashboard.tests.synthetic_run import RunShape, write_run
from clotho.lanes.sampling_client import EngineSampler
from clotho.serving.parts import ServerParts
from clotho.serving.server import ApiServer, base_url, listen
from clotho.settings.bounds import Off
from clotho.settings.server import HttpServer
from tests.fakes import FakeEngine
from tests.serving.running_server import Served, server_context
from tests.training_run.built_context import open_context, tiny_profile
from training_run.run_monitor import RunMonitor
from training_run.start.loading_server import loading_page, while_loading


async def test_a_run_in_progress_is_live_until_its_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest line of the timeline says where the groups are. A request that waits is answered at the end."""
    run = write_run(tmp_path / "run", RunShape(groups=8, steps=2, token_steps=0))
    engine = FakeEngine()
    context = structs.replace(
        server_context(Served(engine, EngineSampler(engine.submit_call, engine)), shutdown_seconds=60.0),
        run_directory=run,
    )
    waiting = anyio.Event()
    original = routes.Dashboard.rows

    async def rows(dashboard: routes.Dashboard, http: Request) -> Response:
        waiting.set()
        return await original(dashboard, http)

    async def end() -> None:
        await waiting.wait()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        url = await tasks.start(ApiServer(context).run)
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            assert (await http.get("/")).headers["content-type"] == "text/html; charset=utf-8"
            assert (await http.get("/v1/models")).status_code == 200
            state = (await http.get("/dashboard/api/runs/0/rows")).json()["state"]
            assert state["live"]
            assert state["in_flight"] == {"queued": 2, "decoding": 6, "scoring": 1, "waiting": 5}
            assert state["seconds_left"] == pytest.approx(32.49)  # ten steps, and the last evaluation
            monkeypatch.setattr(routes, "POLL_SECONDS", 1000.0)
            monkeypatch.setattr(routes.Dashboard, "rows", rows)
            tasks.start_soon(end)
            with anyio.CancelScope(shield=True):
                answer = await http.get("/dashboard/api/runs/0/rows?wait=1")
    assert not answer.json()["state"]["live"]
    engine.close()


async def test_while_the_model_is_loaded_the_page_is_shown_without_data() -> None:
    """The page asks again."""
    settings = HttpServer(port=0)
    listener = listen(settings)

    async def load() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=base_url(listener)) as http:
            paths = ("/", "/dashboard/static/app.js", "/dashboard/static/nothing.js", "/dashboard/api/runs", "/health")
            return [await http.get(path) for path in paths]

    answers = await while_loading(listener, settings, load(), page=loading_page(settings))
    assert [answer.status_code for answer in answers] == [200, 200, 404, 503, 503]
    assert answers[3].json()["error"]["code"] == "loading"
    listener.close()


async def test_the_dashboard_can_be_switched_off(tmp_path: Path) -> None:
    """Then the server has neither the page nor its API."""
    async with open_context(tiny_profile(tmp_path, server={"type": "http", "port": 0})) as parts:
        monitor = RunMonitor(parts, queues=[], children=dict)
        for is_on in (True, False):
            settings = HttpServer(port=0, dashboard=is_on)
            added = ServerParts(monitor.server_context(settings))
            paths = {route.path for pages in added.pages for route in pages(anyio.Event())}
            assert ("/" in paths, "/dashboard/api/runs" in paths) == (is_on, is_on)
            assert (loading_page(settings) is not None) == is_on
    assert loading_page(Off()) is None
