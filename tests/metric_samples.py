"""Families of Prometheus metrics as /metrics shows them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Values = list[tuple[str, dict[str, str], float]]


def samples(text: str) -> Samples:
    """Return the values of a page by name and labels, without the label model_name."""
    return {
        (sample.name, tuple(item for item in sorted(sample.labels.items()) if item[0] != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def kinds(text: str) -> dict[str, str]:
    """Return the type of each metric of a page."""
    found = {family.name: family.type for family in text_string_to_metric_families(text)}
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}


def page(metrics: Iterable[Metric]) -> str:
    """Return a page with these metrics."""

    class Given(Collector):
        def collect(self) -> Iterable[Metric]:
            return metrics

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Given())
    return generate_latest(registry).decode()


def require(metrics: Iterable[Metric], types: dict[str, str], values: Values) -> None:
    """Require exactly these metrics with their types, and these values among theirs."""
    text = page(list(metrics))
    assert kinds(text) == types
    seen = samples(text)
    expected = {(name, tuple(sorted(labels.items()))): value for name, labels, value in values}
    assert len(expected) == len(values)
    assert {key: seen.get(key) for key in expected} == expected
