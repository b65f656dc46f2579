"""Prometheus metrics of /metrics.

Metrics with the meaning of a vLLM metric have vLLM's name, so that vLLM's dashboards work. All other names start with
`clotho_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from clotho.serving.auth import Quota
from clotho.serving.limits import ConcurrencyLimit
from clotho.serving.openai_requests import ValidatedRequest
from clotho.serving.services import EngineSnapshot, QueueSnapshot, RunSnapshot, ServerContext
from protocols.sampling import Completion
from protocols.summary import Distribution, RankGauges, RemoteGauges, SpeculationCounts

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
TIMINGS = {
    "iteration_tokens_total": "Tokens sampled in a decode step.",
    "inter_token_latency_seconds": "Time between two tokens of a sequence.",
    "request_queue_time_seconds": "Time from the submission of a request to its admission.",
    "request_prefill_time_seconds": "Time from the admission of a request until its first sequence is decoded.",
    "request_decode_time_seconds": "Time from then until the last token of the request.",
}
"""Descriptions of the distributions that the engine measures, by name."""

CHOICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """Counters and histograms of HTTP requests; `render` adds the state of the server, the engine and the run."""

    def __init__(
        self, context: ServerContext, limit: Callable[[], ConcurrencyLimit], quotas: Mapping[str, Quota]
    ) -> None:
        """limit: returns that of the running server. quotas: of the API keys, by name."""
        self._registry = CollectorRegistry()
        self._registry.register(_SnapshotCollector(context, limit, quotas))
        self._model = context.settings.model_name
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of HTTP requests.")
        self._generated_tokens = self._counter("vllm:generation_tokens", "Tokens sampled for HTTP requests.")
        self._completions = self._counter(
            "vllm:request_success", "Completions of HTTP requests that finished without an error.", "finished_reason"
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from a validated request to its last token.", SECONDS
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from a validated streaming request to its first token.", SECONDS
        )
        self._n = self._histogram("vllm:request_params_n", "Parameter n of a request.", CHOICES)
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Maximum number of completion tokens, per prompt.", TOKENS
        )
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._completion_length = self._histogram("vllm:request_generation_tokens", "Tokens of a completion.", TOKENS)

    def request_started(self, request: ValidatedRequest) -> None:
        """Count a validated request."""
        self._n.labels(self._model).observe(request.n)
        for sample in request.samples:
            self._prompt_tokens.labels(self._model).inc(len(sample.prompt))
            self._prompt_length.labels(self._model).observe(len(sample.prompt))
            self._max_tokens.labels(self._model).observe(sample.sampling.max_tokens)

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token of a stream."""
        self._first_token.labels(self._model).observe(seconds)

    def request_finished(self, completions: Sequence[Completion], seconds: float) -> None:
        """Count a request that finished without an error."""
        self._latency.labels(self._model).observe(seconds)
        for completion in completions:
            self._completions.labels(self._model, completion.finish_reason).inc()
            self._generated_tokens.labels(self._model).inc(len(completion.tokens))
            self._completion_length.labels(self._model).observe(len(completion.tokens))

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self._registry)


class _SnapshotCollector(Collector):
    """Reads the state of the server, the engine and the run for every scrape."""

    def __init__(
        self, context: ServerContext, limit: Callable[[], ConcurrencyLimit], quotas: Mapping[str, Quota]
    ) -> None:
        self._context, self._limit, self._quotas = context, limit, quotas

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of this moment."""
        snapshot = self._context.snapshot()
        yield from self._server()
        yield from self._engine(snapshot.engine)
        yield from self._training(snapshot)
        yield from _queues(snapshot.queues)
        yield from _remote(snapshot.remote)
        yield from _ranks(snapshot.learner_ranks)
        yield _counter("clotho_child_restarts", "Restarts of a supervised child.", snapshot.restarts, by="child")
        yield _counter("clotho_log_events_lost", "Events that could not be logged.", {"": snapshot.events_lost})

    def _server(self) -> Iterator[Metric]:
        yield _gauge("clotho_http_requests_running", "Admitted HTTP requests.", self._limit().running)
        yield _gauge("clotho_http_requests_queued", "HTTP requests that wait for admission.", self._limit().queued)
        yield _gauge(
            "clotho_sampler_requests", "Sampling requests in flight, of all clients.", self._context.sampler.running
        )
        refused = CounterMetricFamily(
            "clotho_rate_limited_requests", "Requests refused by the quota of their API key.", labels=["key", "limit"]
        )
        for name, quota in self._quotas.items():
            for limit, count in quota.refused.items():
                refused.add_metric([name, limit], count)
        yield refused

    def _engine(self, engine: EngineSnapshot) -> Iterator[Metric]:
        model = {"model_name": self._context.settings.model_name}
        yield _gauge(
            "vllm:num_requests_running", "Sequences in the decode batch.", engine.sequences_running, labels=model
        )
        yield _gauge(
            "vllm:num_requests_waiting", "Sequences that wait for prefill.", engine.sequences_waiting, labels=model
        )
        yield _gauge(
            "clotho_clients_waiting", "Clients with requests that wait for the engine.", engine.clients_waiting
        )
        timed_out = {"queue": self._limit().timed_out + engine.timed_out.get("queue", 0)}
        timed_out["answer"] = engine.timed_out.get("answer", 0)
        yield _counter("clotho_timed_out_requests", "Requests that exceeded a limit on time.", timed_out, by="limit")
        yield _gauge("clotho_sequences_limit", "Sequences that are decoded at once at most.", engine.sequences_limit)
        yield _gauge("vllm:kv_cache_usage_perc", "Fraction of the KV cache in use.", engine.cache_usage, labels=model)
        for name, help_text, value in (
            ("vllm:prefix_cache_queries", "Prompts looked up in the prefix cache.", engine.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompts found in the prefix cache.", engine.prefix_hits),
        ):
            yield _counter(name, help_text, {"": value}, labels=model)
        yield _counter(
            "vllm:num_preemptions", "Sequences that left the batch to continue.", {"": engine.preempted}, labels=model
        )
        yield from _speculation(engine.speculation, model)
        for name, found in engine.timings.items():
            yield _histogram(f"vllm:{name}", TIMINGS[name], {self._context.settings.model_name: found}, "model_name")
        yield _gauge("clotho_prefix_cache_tokens", "Tokens that the prefix cache holds.", engine.prefix_tokens)
        for name, help_text, value in (
            ("clotho_prefill_tokens", "Prompt tokens computed, without padding.", engine.prefill_tokens),
            ("clotho_decode_steps", "Decode steps of the engine.", engine.decode_steps),
            ("clotho_sampled_tokens", "Tokens sampled by the engine, for all clients.", engine.tokens_sampled),
            ("clotho_engine_failed_requests", "Sampling requests that ended with an error.", engine.failed),
            (
                "clotho_engine_listener_errors",
                "Requests aborted by an exception in a listener.",
                engine.listener_errors,
            ),
        ):
            yield _counter(name, help_text, {"": value})
        yield _counter("clotho_completions", "Completions of all clients.", engine.finished, by="finish_reason")
        yield _histogram("clotho_turn_seconds", "Duration of a turn of a compute thread.", engine.turns, "kind")
        yield _gauges("clotho_longest_turn_seconds", "Longest turn so far.", engine.longest_turns, by="kind")

    def _training(self, snapshot: RunSnapshot) -> Iterator[Metric]:
        weights = self._context.weights()
        yield _gauge("clotho_step", "Training step of the served weights.", weights.step)
        yield _gauge("clotho_weights_version", "Policy version of the served weights.", weights.version)
        for name, help_text, value in (
            ("clotho_reward_mean", "Mean reward of the last batch.", snapshot.reward_mean),
            ("clotho_staleness_mean", "Mean staleness of the last batch, in versions.", snapshot.staleness_mean),
            ("clotho_staleness_max", "Largest staleness of the last batch, in versions.", snapshot.staleness_max),
            ("clotho_learner_turn_seconds", "Longest turn of the last update.", snapshot.learner_turn_seconds),
            ("clotho_swap_seconds", "Duration of the last weight swap.", snapshot.swap_seconds),
        ):
            if value is not None:
                yield _gauge(name, help_text, value)
        yield _counter("clotho_groups_trained", "Groups trained on.", {"": snapshot.groups_trained})
        yield _counter("clotho_groups_discarded", "Groups discarded.", snapshot.discarded, by="reason")
        for name, help_text, groups in (
            (
                "clotho_environment_groups_trained",
                "Groups of an environment trained on.",
                snapshot.environments_trained,
            ),
            (
                "clotho_environment_groups_discarded",
                "Groups of an environment discarded.",
                snapshot.environments_discarded,
            ),
        ):
            if groups:
                yield _counter(name, help_text, groups, by="environment")


def _speculation(counts: SpeculationCounts, labels: Mapping[str, str]) -> Iterator[Metric]:
    for name, help_text, value in (
        ("drafts", "Drafts that the engine verified.", counts.drafts),
        ("draft_tokens", "Tokens of these drafts.", counts.draft_tokens),
        ("accepted_tokens", "Accepted tokens of these drafts.", counts.accepted_tokens),
    ):
        yield _counter(f"vllm:spec_decode_num_{name}", help_text, {"": value}, labels=labels)
    yield _counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by position in the draft.",
        {str(position): number for position, number in enumerate(counts.accepted_by_position)},
        labels=labels,
        by="position",
    )


def _queues(queues: Sequence[QueueSnapshot]) -> Iterator[Metric]:
    yield _gauges("clotho_queue_depth", "Messages in a queue.", {one.name: one.depth for one in queues})
    yield _gauges(
        "clotho_queue_capacity", "Capacity of a queue, in messages.", {one.name: one.capacity for one in queues}
    )
    for name, help_text, values in (
        ("clotho_queue_sent_messages", "Messages sent to a queue.", {one.name: one.sent for one in queues}),
        ("clotho_queue_received_messages", "Messages taken from a queue.", {one.name: one.received for one in queues}),
        (
            "clotho_queue_send_wait_seconds",
            "Time that producers waited for room in a queue.",
            {one.name: one.send_wait_seconds for one in queues},
        ),
        (
            "clotho_queue_receive_wait_seconds",
            "Time that consumers waited for a message of a queue.",
            {one.name: one.receive_wait_seconds for one in queues},
        ),
    ):
        yield _counter(name, help_text, values, by="queue")


def _remote(remote: RemoteGauges) -> Iterator[Metric]:
    servers = remote.servers
    if not servers:
        return
    state = StateSetMetricFamily("clotho_remote_server_state", "State of an inference server.", labels=["server"])
    for one in servers:
        state.add_metric([one.name], {name: one.state == name for name in ("ready", "updating", "failed")})
    yield state
    for name, help_text, gauges in (
        (
            "clotho_remote_server_weights_version",
            "Policy version that a server in use serves.",
            {one.name: one.version for one in servers if one.version is not None},
        ),
        (
            "clotho_remote_server_lag_versions",
            "Versions that a server in use is behind the run.",
            {one.name: one.lag for one in servers if one.lag is not None},
        ),
        ("clotho_remote_server_rows", "Completions in flight on a server.", {one.name: one.rows for one in servers}),
    ):
        yield _gauges(name, help_text, gauges, by="server")
    for name, help_text, counts in (
        ("groups", "Groups requested from a server.", {one.name: one.groups for one in servers}),
        ("tokens", "Tokens of the groups that a server has completed.", {one.name: one.tokens for one in servers}),
        ("failures", "Failed attempts and groups of a server.", {one.name: one.failures for one in servers}),
        ("restarts", "Restarts of a server.", {one.name: one.restarts for one in servers}),
        ("sent_bytes", "Weights and requests for a server.", {one.name: one.bytes_sent for one in servers}),
        ("received_bytes", "Answers of a server.", {one.name: one.bytes_received for one in servers}),
    ):
        yield _counter(f"clotho_remote_server_{name}", help_text, counts, by="server")
    yield _counter(
        "clotho_remote_groups_requested_again", "Groups requested again elsewhere.", {"": remote.requested_again}
    )
    yield _histogram(
        "clotho_remote_server_push_seconds",
        "Time until a server served new weights.",
        {one.name: one.pushes for one in servers},
        "server",
    )


def _ranks(found: RankGauges) -> Iterator[Metric]:
    if not found.ranks:
        return
    for name, help_text, counts in (
        ("positions", "Positions of the micro-batches of a rank.", {one.name: one.positions for one in found.ranks}),
        ("seconds", "Time between the shares of a rank and results.", {one.name: one.seconds for one in found.ranks}),
        ("sent_bytes", "Weights and shares for a rank.", {one.name: one.bytes_sent for one in found.ranks}),
    ):
        yield _counter(f"clotho_learner_rank_{name}", help_text, counts, by="rank")
    yield _counter(
        "clotho_learner_ranks_wait_seconds", "Time that rank 0 waited for others.", {"": found.waited_seconds}
    )


def _histogram(name: str, help_text: str, found: Mapping[str, Distribution], by: str) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=[by])
    for key, one in found.items():
        bounds = [*(str(float(bound)) for bound in one.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(one.counts), strict=True))
        family.add_metric([key], buckets, one.total)
    return family


def _gauge(name: str, help_text: str, value: float, *, labels: Mapping[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _gauges(name: str, help_text: str, values: Mapping[str, float], *, by: str = "queue") -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[by])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(
    name: str, help_text: str, values: Mapping[str, float], *, labels: Mapping[str, str] | None = None, by: str = ""
) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[*(labels or {}), *([by] if by else [])])
    for key, value in values.items():
        family.add_metric([*(labels or {}).values(), *([key] if by else [])], value)
    return family
