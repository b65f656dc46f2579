"""Prometheus metrics of inference servers."""

from __future__ import annotations

from attachments.remote.place import RemoteGauges, RemoteServerGauge, server_metrics
from protocols.compute import Distribution
from tests.metric_samples import Values, require

METRICS = {
    "clotho_remote_server_state": "gauge", "clotho_remote_server_weights_version": "gauge",
    "clotho_remote_server_lag_versions": "gauge", "clotho_remote_server_rows": "gauge",
    "clotho_remote_server_groups": "counter", "clotho_remote_server_tokens": "counter",
    "clotho_remote_server_failures": "counter", "clotho_remote_server_restarts": "counter",
    "clotho_remote_server_sent_bytes": "counter", "clotho_remote_server_received_bytes": "counter",
    "clotho_remote_groups_requested_again": "counter", "clotho_remote_server_push_seconds": "histogram",
}  # fmt: skip
"""Every metric with its type. In the text format, the name of a counter ends in `_total`."""

VALUES: Values = [
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
]

REMOTE = RemoteGauges(
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
)


def test_each_metric_shows_its_own_value() -> None:
    """By the address of the server."""
    require(server_metrics(REMOTE), METRICS, VALUES)
