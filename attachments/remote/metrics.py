"""Prometheus metrics of inference servers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric, StateSetMetricFamily

from attachments.remote.gauges import RemoteGauges
from clotho.serving.metrics import counter, gauges, histogram


def server_metrics(remote: RemoteGauges) -> Iterator[Metric]:
    """Yield the state of each server."""
    servers = remote.servers
    if not servers:
        return
    state = StateSetMetricFamily("clotho_remote_server_state", "State of an inference server.", labels=["server"])
    for one in servers:
        state.add_metric([one.name], {name: one.state == name for name in ("ready", "updating", "failed")})
    yield state
    for name, help_text, values in (
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
        yield gauges(name, help_text, values, by="server")
    for name, help_text, counts in (
        ("groups", "Groups requested from a server.", {one.name: one.groups for one in servers}),
        ("tokens", "Tokens of the groups that a server has completed.", {one.name: one.tokens for one in servers}),
        ("failures", "Failed attempts and groups of a server.", {one.name: one.failures for one in servers}),
        ("restarts", "Restarts of a server.", {one.name: one.restarts for one in servers}),
        ("sent_bytes", "Weights and requests for a server.", {one.name: one.bytes_sent for one in servers}),
        ("received_bytes", "Answers of a server.", {one.name: one.bytes_received for one in servers}),
    ):
        yield counter(f"clotho_remote_server_{name}", help_text, counts, by="server")
    yield counter(
        "clotho_remote_groups_requested_again", "Groups requested again elsewhere.", {"": remote.requested_again}
    )
    yield histogram(
        "clotho_remote_server_push_seconds",
        "Time until a server served new weights.",
        {one.name: one.pushes for one in servers},
        "server",
    )
