"""Requests that schemathesis generates from the OpenAPI document: no response is an error of the server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from structlog.testing import capture_logs

from tests.serving.running_server import Served, serving

REQUESTS, MANY_REQUESTS = 40, 20_000
PATIENCE_SECONDS = 300.0
"""Time limit of a request. No assertion depends on it."""

GROWTH_BYTES = 128 << 20
"""Maximum growth of the process over the second half of the requests. Hypothesis keeps about 7 kB of each example in
the same process; the server keeps less than 0.5 kB of a request."""


@contextmanager
def served() -> Iterator[tuple[Served, httpx.Client]]:
    """Serve in another thread, with a client of this thread."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving()) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as client,
    ):
        yield server, client


def cases(document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for valid and invalid requests to every operation."""
    operations: Any = schemathesis.openapi.from_dict(document).get_all_operations()
    strategies = [
        operation.ok().as_strategy(generation_mode=mode)
        for operation in operations
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    ]
    return st.one_of(strategies)


def fuzz(count: int) -> None:
    """Send `count` requests, and check each response and that the server serves afterwards."""
    process, memory = psutil.Process(os.getpid()), list[int]()
    with capture_logs() as events, served() as (_, client):

        @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(cases(client.get("/openapi.json").json()))
        def send(case: Any) -> None:
            answer = case.call(base_url=str(client.base_url), session=None, timeout=PATIENCE_SECONDS)
            memory.append(process.memory_info().rss)
            assert answer.status_code < 500 or answer.status_code == 503, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400:
                assert answer.json().keys() - {"type"} == {"error"}, answer.text

        send()
        good = client.post("/v1/completions", json={"prompt": "good", "max_tokens": 2})
        assert good.status_code == 200
    assert [event for event in events if event["log_level"] == "error"] == []
    assert memory[-1] - memory[len(memory) // 2] < GROWTH_BYTES


def test_no_generated_request_is_an_error_of_the_server() -> None:
    """Status 503 is permitted; every other error is a 4xx with the error object."""
    fuzz(REQUESTS)


@pytest.mark.slow
def test_no_request_of_many_is_an_error_of_the_server() -> None:
    """The memory of the process stays flat."""
    fuzz(MANY_REQUESTS)
