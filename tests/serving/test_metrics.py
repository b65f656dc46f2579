"""/metrics and /health: numbers that are true, under the names that dashboards know."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from clotho.serving.services import EngineSnapshot, HealthReport, QueueSnapshot, RunSnapshot
from protocols.step import WeightsReady
from tests.serving.running_server import Served, serving

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(served: Served) -> Samples:
    """Everything that /metrics says, by name and labels (less model_name)."""
    answer = await served.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(item for item in sorted(sample.labels.items()) if item[0] != "model_name")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_requests_are_counted_exactly() -> None:
    """Tokens, reasons and histograms add up to what was answered."""
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


async def test_the_state_of_the_run_is_the_state_at_the_moment() -> None:
    """Engine, training and mailboxes are asked at every scrape; what is not known yet is left out."""
    async with serving() as served:
        assert ("clotho_reward_mean", ()) not in await scrape(served)
        served.weights = WeightsReady(version=7, step=9, fingerprint="f7")
        served.snapshot = RunSnapshot(
            engine=EngineSnapshot(
                sequences_running=5, sequences_waiting=2, cache_usage=0.25, prefix_queries=100, prefix_hits=40
            ),
            reward_mean=0.5,
            staleness_mean=1.5,
            staleness_max=2,
            swap_seconds=0.0005,
            groups_trained=11,
            discarded={"zero_variance": 3, "stale": 1},
            environments_trained={"game": 7},
            environments_discarded={"game": 2},
            queues=(QueueSnapshot(name="prompts", depth=4, capacity=16),),
        )
        seen = await scrape(served)
        assert seen["vllm:num_requests_running", ()] == 5
        assert seen["vllm:num_requests_waiting", ()] == 2
        assert seen["vllm:kv_cache_usage_perc", ()] == 0.25
        assert seen["vllm:prefix_cache_queries_total", ()] == 100
        assert seen["vllm:prefix_cache_hits_total", ()] == 40
        assert (seen["clotho_step", ()], seen["clotho_weights_version", ()]) == (9, 7)
        assert (seen["clotho_reward_mean", ()], seen["clotho_swap_seconds", ()]) == (0.5, 0.0005)
        assert (seen["clotho_staleness_mean", ()], seen["clotho_staleness_max", ()]) == (1.5, 2)
        assert seen["clotho_groups_trained_total", ()] == 11
        assert seen["clotho_groups_discarded_total", (("reason", "zero_variance"),)] == 3
        assert seen["clotho_environment_groups_trained_total", (("environment", "game"),)] == 7
        assert seen["clotho_environment_groups_discarded_total", (("environment", "game"),)] == 2
        assert seen["clotho_queue_depth", (("queue", "prompts"),)] == 4
        assert seen["clotho_queue_capacity", (("queue", "prompts"),)] == 16


async def test_requests_in_flight_return_to_zero_when_clients_leave() -> None:
    """The gauge counts requests that run, and no others."""
    async with serving() as served:
        served.engine.allow(2)
        stream = {"prompt": "x", "stream": True, "ignore_eos": True}
        async with served.http.stream("POST", "/v1/completions", json=stream):
            assert (await scrape(served))["clotho_sampler_requests", ()] == 1
        await served.engine.until(lambda: served.engine.running == 0)
        assert (await scrape(served))["clotho_sampler_requests", ()] == 0


async def test_health_says_what_serves_and_how_it_is() -> None:
    """200 while all is well, 503 with the reason where the compute thread stands still or the engine has failed."""
    async with serving() as served:
        answer = await served.http.get("/health")
        assert answer.status_code == 200
        assert answer.headers["x-clotho-weights-version"] == "3"
        assert answer.json() == {
            "status": "ok",
            "detail": "",
            "model": "policy",
            "weights_version": 3,
            "step": 4,
            "fingerprint": "f3",
            "progress_seconds": 0.5,
            "children": {"learner": "running"},
        }
        for status in ("stalled", "failed"):
            served.health = HealthReport(status=status, detail="no progress for 130 s")
            answer = await served.http.get("/health")
            assert answer.status_code == 503
            assert answer.json()["detail"] == "no progress for 130 s"
