"""Prometheus metrics of /metrics.

Metrics with the meaning of a vLLM metric have vLLM's name, so that vLLM's dashboards work. All other names start with
`clotho_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from clotho.serving.auth import Quota
from clotho.serving.limits import ConcurrencyLimit
from clotho.serving.services import ServerContext
from protocols.compute import Distribution
from protocols.sampling import Completion

if TYPE_CHECKING:
    from clotho.serving.chat_extension import ValidatedRequest


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
CHOICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics(Collector):
    """Counters and histograms of HTTP requests; `render` adds the state of the server, the engine and the run."""

    def __init__(
        self, context: ServerContext, limit: Callable[[], ConcurrencyLimit], quotas: Mapping[str, Quota]
    ) -> None:
        """limit: returns that of the running server. quotas: of the API keys, by name."""
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._context, self._limit, self._quotas = context, limit, quotas
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

    def collect(self) -> Iterator[Metric]:
        """Yield the state of this moment: of the server, the engine and the run."""
        yield gauge("clotho_http_requests_running", "Admitted HTTP requests.", self._limit().running)
        yield gauge("clotho_http_requests_queued", "HTTP requests that wait for admission.", self._limit().queued)
        yield gauge(
            "clotho_sampler_requests", "Sampling requests in flight, of all clients.", self._context.sampler.running
        )
        refused = CounterMetricFamily(
            "clotho_rate_limited_requests", "Requests refused by the quota of their API key.", labels=["key", "limit"]
        )
        for name, quota in self._quotas.items():
            for limit, count in quota.refused.items():
                refused.add_metric([name, limit], count)
        yield refused
        weights = self._context.weights()
        yield gauge("clotho_step", "Training step of the served weights.", weights.step)
        yield gauge("clotho_weights_version", "Policy version of the served weights.", weights.version)
        yield from self._context.measure({"queue": self._limit().timed_out})

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self._registry)


def histogram(name: str, help_text: str, found: Mapping[str, Distribution], by: str) -> Metric:
    """Return distributions, each with the value of the label `by`."""
    family = HistogramMetricFamily(name, help_text, labels=[by])
    for key, one in found.items():
        bounds = [*(str(float(bound)) for bound in one.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(one.counts), strict=True))
        family.add_metric([key], buckets, one.total)
    return family


def gauge(name: str, help_text: str, value: float, *, labels: Mapping[str, str] | None = None) -> Metric:
    """Return one value with labels."""
    family = GaugeMetricFamily(name, help_text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def gauges(name: str, help_text: str, values: Mapping[str, float], *, by: str = "queue") -> Metric:
    """Return values, each with the value of the label `by`."""
    family = GaugeMetricFamily(name, help_text, labels=[by])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def counter(
    name: str, help_text: str, values: Mapping[str, float], *, labels: Mapping[str, str] | None = None, by: str = ""
) -> Metric:
    """Return totals with labels, each with the value of the label `by`; without `by`, there is one."""
    family = CounterMetricFamily(name, help_text, labels=[*(labels or {}), *([by] if by else [])])
    for key, value in values.items():
        family.add_metric([*(labels or {}).values(), *([key] if by else [])], value)
    return family
