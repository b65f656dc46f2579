"""Families of Prometheus metrics: values by the value of one label."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from protocols.summary import Distribution


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
