"""GET /metrics and GET /health."""

from __future__ import annotations

import anyio
import anyio.lowlevel
from prometheus_client.parser import text_string_to_metric_families

from clotho.serving.metrics import TIMINGS
from clotho.serving.services import EngineSnapshot, HealthReport, QueueSnapshot, RunSnapshot
from protocols.step import WeightsReady
from protocols.summary import (
    Distribution,
    RankGauge,
    RankGauges,
    RemoteGauges,
    RemoteServerGauge,
    SpeculationCounts,
)
from tests.serving.running_server import Served, serving

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(served: Served) -> Samples:
    """Return the values of /metrics by name and labels, without the label model_name."""
    answer = await served.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(item for item in sorted(sample.labels.items()) if item[0] != "model_name")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


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


SNAPSHOT = RunSnapshot(
    events_lost=4,
    engine=EngineSnapshot(
        sequences_running=5,
        sequences_waiting=2,
        sequences_limit=32,
        cache_usage=0.25,
        prefix_queries=100,
        prefix_hits=40,
        prefix_tokens=900,
        preempted=6,
        timings=dict.fromkeys(TIMINGS, Distribution(bounds=(0.1, 1.0), counts=(2, 3, 4), total=12.5)),
        prefill_tokens=7000,
        decode_steps=300,
        tokens_sampled=1200,
        finished={"stop": 8, "length": 3},
        failed=1,
        listener_errors=2,
        speculation=SpeculationCounts(drafts=20, draft_tokens=70, accepted_by_position=(15, 9)),
        turns={"parity": Distribution(bounds=(0.1, 1.0), counts=(5, 6, 7), total=8.5)},
        longest_turns={"parity": 2.25},
    ),
    reward_mean=0.5,
    staleness_mean=1.5,
    staleness_max=2,
    swap_seconds=0.0005,
    learner_turn_seconds=0.25,
    groups_trained=11,
    discarded={"zero_variance": 3, "stale": 1},
    environments_trained={"game": 7},
    environments_discarded={"game": 2},
    queues=(
        QueueSnapshot(
            name="prompts",
            depth=4,
            capacity=16,
            sent=20,
            received=16,
            send_wait_seconds=1.25,
            receive_wait_seconds=0.5,
        ),
    ),
    restarts={"server": 1},
    remote=RemoteGauges(
        requested_again=13,
        servers=(
            RemoteServerGauge(
                name="http://a:1",
                state="ready",
                version=6,
                lag=1,
                rows=8,
                groups=21,
                tokens=900,
                failures=14,
                restarts=2,
                bytes_sent=5000,
                bytes_received=700,
                push_seconds=0.02,
                pushes=Distribution(bounds=(0.05,), counts=(9, 1), total=1.75),
            ),
        ),
    ),
    learner_ranks=RankGauges(
        waited_seconds=0.125, ranks=(RankGauge(name="1", positions=4096, seconds=2.25, bytes_sent=80),)
    ),
)
METRICS = {
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:num_preemptions": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "clotho_http_requests_running": "gauge",
    "clotho_http_requests_queued": "gauge",
    "clotho_sampler_requests": "gauge",
    "clotho_clients_waiting": "gauge",
    "clotho_timed_out_requests": "counter",
    "clotho_rate_limited_requests": "counter",
    "clotho_sequences_limit": "gauge",
    "clotho_prefix_cache_tokens": "gauge",
    "clotho_prefill_tokens": "counter",
    "clotho_decode_steps": "counter",
    "clotho_sampled_tokens": "counter",
    "clotho_engine_failed_requests": "counter",
    "clotho_engine_listener_errors": "counter",
    "clotho_log_events_lost": "counter",
    "clotho_completions": "counter",
    "clotho_turn_seconds": "histogram",
    "clotho_longest_turn_seconds": "gauge",
    "clotho_step": "gauge",
    "clotho_weights_version": "gauge",
    "clotho_reward_mean": "gauge",
    "clotho_staleness_mean": "gauge",
    "clotho_staleness_max": "gauge",
    "clotho_swap_seconds": "gauge",
    "clotho_learner_turn_seconds": "gauge",
    "clotho_groups_trained": "counter",
    "clotho_groups_discarded": "counter",
    "clotho_environment_groups_trained": "counter",
    "clotho_environment_groups_discarded": "counter",
    "clotho_queue_depth": "gauge",
    "clotho_queue_capacity": "gauge",
    "clotho_queue_sent_messages": "counter",
    "clotho_queue_received_messages": "counter",
    "clotho_queue_send_wait_seconds": "counter",
    "clotho_queue_receive_wait_seconds": "counter",
    "clotho_child_restarts": "counter",
    "clotho_remote_server_state": "gauge",
    "clotho_remote_server_weights_version": "gauge",
    "clotho_remote_server_lag_versions": "gauge",
    "clotho_remote_server_rows": "gauge",
    "clotho_remote_server_groups": "counter",
    "clotho_remote_server_tokens": "counter",
    "clotho_remote_server_failures": "counter",
    "clotho_remote_server_restarts": "counter",
    "clotho_remote_server_sent_bytes": "counter",
    "clotho_remote_server_received_bytes": "counter",
    "clotho_remote_groups_requested_again": "counter",
    "clotho_remote_server_push_seconds": "histogram",
    "clotho_learner_rank_positions": "counter",
    "clotho_learner_rank_seconds": "counter",
    "clotho_learner_rank_sent_bytes": "counter",
    "clotho_learner_ranks_wait_seconds": "counter",
}
"""Every metric of /metrics with its type. In the text format, the name of a counter ends in `_total`."""


async def test_metrics_have_exactly_these_names_and_types() -> None:
    """docs/http-api.md contains the same list."""
    async with serving() as served:
        served.snapshot = SNAPSHOT
        text = (await served.http.get("/metrics")).text
        families = {family.name: family.type for family in text_string_to_metric_families(text)}
        created = {name for name in families if name.endswith("_created")}
        assert {name: kind for name, kind in families.items() if name not in created} == METRICS


VALUES: list[tuple[str, dict[str, str], float]] = [
    ("vllm:num_requests_running", {}, 5),
    ("vllm:num_requests_waiting", {}, 2),
    ("vllm:kv_cache_usage_perc", {}, 0.25),
    ("vllm:prefix_cache_queries_total", {}, 100),
    ("vllm:prefix_cache_hits_total", {}, 40),
    ("vllm:num_preemptions_total", {}, 6),
    ("vllm:spec_decode_num_drafts_total", {}, 20),
    ("vllm:spec_decode_num_draft_tokens_total", {}, 70),
    ("vllm:spec_decode_num_accepted_tokens_total", {}, 24),
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", {"position": "1"}, 9),
    ("vllm:inter_token_latency_seconds_bucket", {"le": "0.1"}, 2),
    ("vllm:inter_token_latency_seconds_bucket", {"le": "1.0"}, 5),
    ("vllm:inter_token_latency_seconds_bucket", {"le": "+Inf"}, 9),
    ("vllm:inter_token_latency_seconds_count", {}, 9),
    ("vllm:inter_token_latency_seconds_sum", {}, 12.5),
    ("clotho_sequences_limit", {}, 32),
    ("clotho_prefix_cache_tokens", {}, 900),
    ("clotho_prefill_tokens_total", {}, 7000),
    ("clotho_decode_steps_total", {}, 300),
    ("clotho_sampled_tokens_total", {}, 1200),
    ("clotho_completions_total", {"finish_reason": "stop"}, 8),
    ("clotho_engine_failed_requests_total", {}, 1),
    ("clotho_engine_listener_errors_total", {}, 2),
    ("clotho_log_events_lost_total", {}, 4),
    ("clotho_turn_seconds_bucket", {"kind": "parity", "le": "1.0"}, 11),
    ("clotho_turn_seconds_sum", {"kind": "parity"}, 8.5),
    ("clotho_longest_turn_seconds", {"kind": "parity"}, 2.25),
    ("clotho_step", {}, 9),
    ("clotho_weights_version", {}, 7),
    ("clotho_reward_mean", {}, 0.5),
    ("clotho_swap_seconds", {}, 0.0005),
    ("clotho_learner_turn_seconds", {}, 0.25),
    ("clotho_staleness_mean", {}, 1.5),
    ("clotho_staleness_max", {}, 2),
    ("clotho_groups_trained_total", {}, 11),
    ("clotho_groups_discarded_total", {"reason": "zero_variance"}, 3),
    ("clotho_environment_groups_trained_total", {"environment": "game"}, 7),
    ("clotho_environment_groups_discarded_total", {"environment": "game"}, 2),
    ("clotho_queue_depth", {"queue": "prompts"}, 4),
    ("clotho_queue_capacity", {"queue": "prompts"}, 16),
    ("clotho_queue_sent_messages_total", {"queue": "prompts"}, 20),
    ("clotho_queue_received_messages_total", {"queue": "prompts"}, 16),
    ("clotho_queue_send_wait_seconds_total", {"queue": "prompts"}, 1.25),
    ("clotho_queue_receive_wait_seconds_total", {"queue": "prompts"}, 0.5),
    ("clotho_child_restarts_total", {"child": "server"}, 1),
    ("clotho_remote_server_state", {"server": "http://a:1", "clotho_remote_server_state": "ready"}, 1),
    ("clotho_remote_server_state", {"server": "http://a:1", "clotho_remote_server_state": "failed"}, 0),
    ("clotho_remote_server_weights_version", {"server": "http://a:1"}, 6),
    ("clotho_remote_server_lag_versions", {"server": "http://a:1"}, 1),
    ("clotho_remote_server_rows", {"server": "http://a:1"}, 8),
    ("clotho_remote_server_groups_total", {"server": "http://a:1"}, 21),
    ("clotho_remote_server_tokens_total", {"server": "http://a:1"}, 900),
    ("clotho_remote_server_failures_total", {"server": "http://a:1"}, 14),
    ("clotho_remote_server_restarts_total", {"server": "http://a:1"}, 2),
    ("clotho_remote_server_sent_bytes_total", {"server": "http://a:1"}, 5000),
    ("clotho_remote_server_received_bytes_total", {"server": "http://a:1"}, 700),
    ("clotho_remote_groups_requested_again_total", {}, 13),
    ("clotho_remote_server_push_seconds_bucket", {"server": "http://a:1", "le": "0.05"}, 9),
    ("clotho_remote_server_push_seconds_sum", {"server": "http://a:1"}, 1.75),
    ("clotho_learner_rank_positions_total", {"rank": "1"}, 4096),
    ("clotho_learner_rank_seconds_total", {"rank": "1"}, 2.25),
    ("clotho_learner_rank_sent_bytes_total", {"rank": "1"}, 80),
    ("clotho_learner_ranks_wait_seconds_total", {}, 0.125),
]


async def test_a_scrape_shows_the_current_state_of_the_run() -> None:
    """Each metric shows its own field of the snapshot."""
    async with serving() as served:
        served.weights = WeightsReady(version=7, step=9, fingerprint="f7")
        served.snapshot = SNAPSHOT
        seen = await scrape(served)
    expected = {(name, tuple(sorted(labels.items()))): value for name, labels, value in VALUES}
    assert len(expected) == len(VALUES)
    assert {key: seen.get(key) for key in expected} == expected


async def test_a_value_that_has_not_been_measured_is_absent() -> None:
    """Before the first update there is no reward."""
    async with serving() as served:
        seen = {name for name, _ in await scrape(served)}
        assert not seen & {"clotho_reward_mean", "clotho_staleness_mean", "clotho_swap_seconds"}


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
            "status": "ok",
            "detail": "",
            "model": "policy",
            "weights_version": 3,
            "step": 4,
            "fingerprint": "f3",
            "progress_seconds": 0.5,
            "children": {"learner": "running"},
            "findings": [],
        }
        for status in ("stalled", "failed"):
            served.health = HealthReport(status=status, detail="no progress for 130 s")
            answer = await served.http.get("/health")
            assert answer.status_code == 503
            assert answer.json()["detail"] == "no progress for 130 s"
