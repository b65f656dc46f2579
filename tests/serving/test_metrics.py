"""GET /metrics and GET /health."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import anyio
import anyio.lowlevel
from prometheus_client.core import Metric

from clotho.serving.metrics import gauge
from clotho.serving.services import HealthReport
from protocols.step import WeightsReady
from tests.metric_samples import Samples, kinds, samples
from tests.serving.running_server import Served, serving


async def scrape(served: Served) -> Samples:
    """Return the values of /metrics by name and labels, without the label model_name."""
    answer = await served.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


def measured(timed_out: Mapping[str, int]) -> Iterable[Metric]:
    """A metric of the program: the requests that waited for too long."""
    yield gauge("clotho_measured", "Of the program.", timed_out["queue"])


async def test_requests_are_counted_exactly() -> None:
    """Token counters and histograms agree with the responses."""
    async with serving() as served:
        fields = {"max_tokens": 5, "ignore_eos": True, "n": 3}
        assert (await served.post("/v1/completions", prompt=["abc", "de"], **fields)).status_code == 200
        async with served.http.stream(
            "POST", "/v1/completions", json={"prompt": "xy", "stream": True, **fields}
        ) as one:
            await one.aread()
        await served.post("/v1/completions", prompt="", **fields)
        seen = await scrape(served)
        assert seen["vllm:prompt_tokens_total", ()] == 7
        assert seen["vllm:generation_tokens_total", ()] == 45
        assert seen["vllm:request_success_total", (("finished_reason", "length"),)] == 9
        assert seen["vllm:request_params_n_sum", ()] == 6
        assert seen["vllm:request_generation_tokens_count", ()] == 9
        assert seen["vllm:e2e_request_latency_seconds_count", ()] == 2
        assert seen["vllm:time_to_first_token_seconds_count", ()] == 1


METRICS = {
    "vllm:prompt_tokens": "counter", "vllm:generation_tokens": "counter", "vllm:request_success": "counter",
    "vllm:e2e_request_latency_seconds": "histogram", "vllm:time_to_first_token_seconds": "histogram",
    "vllm:request_params_n": "histogram", "vllm:request_params_max_tokens": "histogram",
    "vllm:request_prompt_tokens": "histogram", "vllm:request_generation_tokens": "histogram",
    "clotho_http_requests_running": "gauge", "clotho_http_requests_queued": "gauge", "clotho_sampler_requests": "gauge",
    "clotho_rate_limited_requests": "counter", "clotho_step": "gauge", "clotho_weights_version": "gauge",
    "clotho_measured": "gauge",
}  # fmt: skip
"""Every metric of the server with its type. In the text format, the name of a counter ends in `_total`."""


async def test_metrics_have_exactly_these_names_and_types() -> None:
    """docs/http-api.md lists them."""
    async with serving() as served:
        served.measured = measured
        assert kinds((await served.http.get("/metrics")).text) == METRICS


async def test_a_scrape_shows_the_current_state_of_what_is_served() -> None:
    """With the version of the weights, and what the program measures."""
    async with serving() as served:
        served.weights = WeightsReady(version=7, step=9, fingerprint="f7")
        served.measured = measured
        seen = await scrape(served)
    names = ("clotho_step", "clotho_weights_version", "clotho_measured")
    assert [seen[name, ()] for name in names] == [9, 7, 0]


async def test_queued_http_requests_are_counted() -> None:
    """Requests beyond `max_concurrent` wait for admission."""
    async with serving(max_concurrent=1) as served:
        served.engine.allow(0)
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(lambda: served.post("/v1/completions", prompt="x"))
            with anyio.fail_after(10):
                while served.server.limit.queued != 1:
                    await anyio.lowlevel.checkpoint()
            seen = await scrape(served)
            assert seen["clotho_http_requests_running", ()] == seen["clotho_http_requests_queued", ()] == 1
            served.engine.allow(10**6)


async def test_a_disconnect_removes_a_request_from_the_gauge() -> None:
    """The gauge counts only requests in flight."""
    async with serving() as served:
        served.engine.allow(2)
        stream = {"prompt": "x", "stream": True, "ignore_eos": True}
        async with served.http.stream("POST", "/v1/completions", json=stream):
            assert (await scrape(served))["clotho_sampler_requests", ()] == 1
        await served.engine.wait_until(lambda: served.engine.running == 0)
        assert (await scrape(served))["clotho_sampler_requests", ()] == 0


async def test_health_reports_the_weights_and_the_state_of_the_run() -> None:
    """Status 200 if the state is ok, otherwise 503 with the reason."""
    async with serving() as served:
        answer = await served.http.get("/health")
        assert answer.status_code == 200
        assert answer.headers["x-clotho-weights-version"] == "3"
        assert answer.json() == {
            "status": "ok", "detail": "", "model": "policy", "weights_version": 3, "step": 4, "fingerprint": "f3",
            "progress_seconds": 0.5, "children": {"learner": "running"}, "findings": [],
        }  # fmt: skip
        for status in ("stalled", "failed"):
            served.health = HealthReport(status=status, detail="no progress for 130 s")
            answer = await served.http.get("/health")
            assert answer.status_code == 503
            assert answer.json()["detail"] == "no progress for 130 s"
