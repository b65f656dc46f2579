"""Prometheus metrics of the decode engine and the compute threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from clotho.inference.engine import EngineStats
from clotho.lanes.arbiter import TurnKind, TurnTimes
from clotho.serving.metrics import counter, gauge, gauges, histogram

TIMINGS = {
    "iteration_tokens_total": "Tokens sampled in a decode step.",
    "inter_token_latency_seconds": "Time between two tokens of a sequence.",
    "request_queue_time_seconds": "Time from the submission of a request to its admission.",
    "request_prefill_time_seconds": "Time from the admission of a request until its first sequence is decoded.",
    "request_decode_time_seconds": "Time from then until the last token of the request.",
}
"""Descriptions of the distributions that the engine measures, by name."""


def engine_metrics(
    stats: EngineStats,
    turns: Mapping[TurnKind, TurnTimes],
    *,
    kv_cache_tokens: int,
    model: str,
    timed_out: Mapping[str, int],
) -> Iterator[Metric]:
    """Yield the metrics of an engine. turns: durations of the turns of the compute threads, by kind.

    kv_cache_tokens: size of the KV cache. model: value of the label `model_name`. timed_out: requests that exceeded a
    limit on time before they reached the engine, by limit.
    """
    labels, drafts = {"model_name": model}, stats.speculation
    yield gauge("vllm:num_requests_running", "Sequences in the decode batch.", stats.running_rows, labels=labels)
    yield gauge("vllm:num_requests_waiting", "Sequences that wait for prefill.", stats.waiting_rows, labels=labels)
    yield gauge("clotho_clients_waiting", "Clients with requests that wait for the engine.", stats.waiting_clients)
    overdue = {limit: timed_out.get(limit, 0) + stats.timed_out.get(limit, 0) for limit in ("queue", "answer")}
    yield counter("clotho_timed_out_requests", "Requests that exceeded a limit on time.", overdue, by="limit")
    yield gauge("clotho_sequences_limit", "Sequences that are decoded at once at most.", stats.rows_limit)
    used = stats.cache_tokens / kv_cache_tokens
    yield gauge("vllm:kv_cache_usage_perc", "Fraction of the KV cache in use.", used, labels=labels)
    looked_up = stats.prefix_hits + stats.prefix_misses
    for name, help_text, value in (
        ("vllm:prefix_cache_queries", "Prompts looked up in the prefix cache.", looked_up),
        ("vllm:prefix_cache_hits", "Prompts found in the prefix cache.", stats.prefix_hits),
        ("vllm:num_preemptions", "Sequences that left the batch to continue.", stats.preempted),
        ("vllm:spec_decode_num_drafts", "Drafts that the engine verified.", drafts.drafts),
        ("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts.", drafts.draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Accepted tokens of these drafts.", drafts.accepted_tokens),
    ):
        yield counter(name, help_text, {"": value}, labels=labels)
    yield counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by position in the draft.",
        {str(position): number for position, number in enumerate(drafts.accepted_by_position)},
        labels=labels,
        by="position",
    )
    for name, found in stats.timings.items():
        yield histogram(f"vllm:{name}", TIMINGS[name], {model: found}, "model_name")
    yield gauge("clotho_prefix_cache_tokens", "Tokens that the prefix cache holds.", stats.prefix_cache_tokens)
    for name, help_text, value in (
        ("clotho_prefill_tokens", "Prompt tokens computed, without padding.", stats.prefill_tokens),
        ("clotho_decode_steps", "Decode steps of the engine.", stats.decode_steps),
        ("clotho_sampled_tokens", "Tokens sampled by the engine, for all clients.", stats.tokens_sampled),
        ("clotho_engine_failed_requests", "Sampling requests that ended with an error.", stats.failed),
        ("clotho_engine_listener_errors", "Requests aborted by an exception in a listener.", stats.listener_errors),
    ):
        yield counter(name, help_text, {"": value})
    yield counter("clotho_completions", "Completions of all clients.", stats.finished, by="finish_reason")
    durations = {str(kind): times.seconds for kind, times in turns.items()}
    yield histogram("clotho_turn_seconds", "Duration of a turn of a compute thread.", durations, "kind")
    longest = {str(kind): times.longest for kind, times in turns.items()}
    yield gauges("clotho_longest_turn_seconds", "Longest turn so far.", longest, by="kind")
