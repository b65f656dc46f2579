"""Prometheus metrics of the decode engine."""

from __future__ import annotations

from clotho.engine_metrics import TIMINGS, engine_metrics
from clotho.inference.engine import EngineStats
from clotho.lanes.arbiter import TurnKind, TurnTimes
from protocols.compute import Distribution, SpeculationCounts
from tests.metric_samples import Values, require

METRICS = {
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
    "clotho_clients_waiting": "gauge",
    "clotho_timed_out_requests": "counter",
    "clotho_sequences_limit": "gauge",
    "clotho_prefix_cache_tokens": "gauge",
    "clotho_prefill_tokens": "counter",
    "clotho_decode_steps": "counter",
    "clotho_sampled_tokens": "counter",
    "clotho_engine_failed_requests": "counter",
    "clotho_engine_listener_errors": "counter",
    "clotho_completions": "counter",
    "clotho_turn_seconds": "histogram",
    "clotho_longest_turn_seconds": "gauge",
}
"""Every metric with its type. In the text format, the name of a counter ends in `_total`."""

VALUES: Values = [
    ("clotho_clients_waiting", {}, 4),
    ("clotho_timed_out_requests_total", {"limit": "queue"}, 3),
    ("clotho_timed_out_requests_total", {"limit": "answer"}, 4),
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
    ("clotho_turn_seconds_bucket", {"kind": "parity", "le": "1.0"}, 11),
    ("clotho_turn_seconds_sum", {"kind": "parity"}, 8.5),
    ("clotho_longest_turn_seconds", {"kind": "parity"}, 2.25),
]

STATS = EngineStats(
    running_rows=5,
    waiting_rows=2,
    waiting_clients=4,
    rows_limit=32,
    cache_tokens=1024,
    cache_holders=(),
    prefix_cache_tokens=900,
    tokens_sampled=1200,
    prefill_tokens=7000,
    prefix_hits=40,
    prefix_misses=60,
    decode_steps=300,
    finished={"stop": 8, "length": 3},
    failed=1,
    listener_errors=2,
    preempted=6,
    timed_out={"queue": 1, "answer": 4},
    timings=dict.fromkeys(TIMINGS, Distribution(bounds=(0.1, 1.0), counts=(2, 3, 4), total=12.5)),
    speculation=SpeculationCounts(drafts=20, draft_tokens=70, accepted_by_position=(15, 9)),
)
TURNS: dict[TurnKind, TurnTimes] = {
    "parity": TurnTimes(seconds=Distribution(bounds=(0.1, 1.0), counts=(5, 6, 7), total=8.5), longest=2.25)
}


def test_each_metric_shows_its_own_value() -> None:
    """Requests that timed out before they reached the engine count too."""
    require(engine_metrics(STATS, TURNS, kv_cache_tokens=4096, model="m", timed_out={"queue": 2}), METRICS, VALUES)
