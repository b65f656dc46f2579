"""Prometheus metrics: vLLM's names where they mean the same, so its dashboards work; `clotho_*` for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from clotho.serving.sample_requests import Ask
from clotho.serving.services import GatewayServices, TrainingNumbers
from protocols.sampling import Completion

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
CHOICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class RequestMetrics:
    """Counts what passes through the HTTP API; `render` adds the state of the engine and of the training run."""

    def __init__(self, services: GatewayServices) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Snapshot(services))
        self._model = services.settings.model_name
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens asked over HTTP.")
        self._tokens = self._counter("vllm:generation_tokens", "Tokens sampled for HTTP clients.")
        self._finished = self._counter("vllm:request_success", "Completions that ended well.", "finished_reason")
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "Request to last token.", SECONDS)
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Streams only: to first token.", SECONDS)
        self._asked_n = self._histogram("vllm:request_params_n", "n of the request.", CHOICES)
        self._asked_tokens = self._histogram("vllm:request_params_max_tokens", "Limit of each prompt.", TOKENS)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Tokens of each prompt.", TOKENS)
        self._drawn = self._histogram("vllm:request_generation_tokens", "Tokens of each completion.", TOKENS)

    def asked(self, ask: Ask) -> None:
        """Count a request that passed validation."""
        self._asked_n.labels(self._model).observe(ask.n)
        for request in ask.requests:
            self._prompt_tokens.labels(self._model).inc(len(request.prompt))
            self._prompt.labels(self._model).observe(len(request.prompt))
            self._asked_tokens.labels(self._model).observe(request.sampling.max_tokens)

    def first_token(self, seconds: float) -> None:
        """Note the first token of a stream."""
        self._first.labels(self._model).observe(seconds)

    def finished(self, completions: Sequence[Completion], seconds: float) -> None:
        """Count a request that ended well."""
        self._latency.labels(self._model).observe(seconds)
        for completion in completions:
            self._finished.labels(self._model, completion.finish_reason).inc()
            self._tokens.labels(self._model).inc(len(completion.tokens))
            self._drawn.labels(self._model).observe(len(completion.tokens))

    def render(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self._registry)


class _Snapshot(Collector):
    """What is so at the moment of asking."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        numbers = self._services.numbers()
        yield from self._serving(numbers)
        yield from self._training(numbers)

    def _serving(self, numbers: TrainingNumbers) -> Iterator[Metric]:
        engine = numbers.engine
        label = {"model_name": self._services.settings.model_name}
        yield _gauge("vllm:num_requests_running", "Sequences being decoded.", engine.rows_running, label)
        yield _gauge("vllm:num_requests_waiting", "Sequences not yet begun.", engine.rows_waiting, label)
        yield _gauge(
            "vllm:kv_cache_usage_perc", "Part of the key-value cache in use, 0 to 1.", engine.cache_usage, label
        )
        yield _counter(
            "vllm:prefix_cache_queries", "Prompts looked up in the prefix cache.", {"": engine.prefix_queries}, label
        )
        yield _counter("vllm:prefix_cache_hits", "Prompts found in the prefix cache.", {"": engine.prefix_hits}, label)
        yield _gauge("clotho_sampler_requests", "Requests of every kind in flight.", self._services.sampler.running)

    def _training(self, numbers: TrainingNumbers) -> Iterator[Metric]:
        weights = self._services.weights()
        yield _gauge("clotho_step", "Batches consumed.", weights.step)
        yield _gauge("clotho_weights_version", "Updates applied to the weights that serve.", weights.version)
        for name, help_text, value in (
            ("clotho_reward_mean", "Mean reward of the last batch.", numbers.reward_mean),
            ("clotho_staleness_mean", "Mean age in versions of the last batch.", numbers.staleness_mean),
            ("clotho_staleness_max", "Largest age in versions of the last batch.", numbers.staleness_max),
            ("clotho_swap_seconds", "Time the last swap of weights took.", numbers.swap_seconds),
        ):
            if value is not None:
                yield _gauge(name, help_text, value)
        yield _counter("clotho_groups_trained", "Groups trained on.", {"": numbers.groups_trained})
        yield _counter("clotho_groups_discarded", "Groups not trained on.", numbers.discarded, by="reason")
        for name, help_text, ended in (
            ("clotho_environment_groups_trained", "Groups of an environment trained on.", numbers.environments_trained),
            ("clotho_environment_groups_discarded", "Its groups not trained on.", numbers.environments_discarded),
        ):
            if ended:
                yield _counter(name, help_text, ended, by="environment")
        yield _per_mailbox("clotho_mailbox_depth", "Messages waiting.", numbers.depths)
        yield _per_mailbox("clotho_mailbox_capacity", "Messages that fit.", numbers.capacities)


def _gauge(name: str, help_text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family


def _counter(
    name: str, help_text: str, values: Mapping[str, float], labels: Mapping[str, str] | None = None, *, by: str = ""
) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[*(labels or {}), *([by] if by else [])])
    for key, value in values.items():
        family.add_metric([*(labels or {}).values(), *([key] if by else [])], value)
    return family


def _per_mailbox(name: str, help_text: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=["mailbox"])
    for mailbox, value in values.items():
        family.add_metric([mailbox], value)
    return family
