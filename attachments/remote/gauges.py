"""State of the inference servers of a run, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct
from prometheus_client.core import Metric, StateSetMetricFamily

from attachments.remote.attachment import REMOTE_METRICS
from clotho.serving.metrics import counter, gauges, histogram
from protocols.summary import Distribution
from training_run.records.terminal_text import memory, number


class RemoteServerGauge(Struct, frozen=True, kw_only=True):
    """State of a remote inference server. Totals count since the last start; None means that it gets no groups.

    state: `ready` gets groups, `updating` gets weights, `failed` could not be used at the last attempt.
    version: policy version that it serves. lag: versions behind the weights that the run serves.
    rows: completions in flight. groups: groups requested from it. tokens: of the groups that it has completed.
    failures: failed attempts and groups. restarts: how often another process than before has answered.
    bytes_sent, bytes_received: weights and requests for it, and its answers.
    push_seconds: time until it served the last weights that it got. pushes: distribution of this time.
    """

    name: str
    state: Literal["ready", "updating", "failed"]
    version: int | None
    lag: int | None
    rows: int
    groups: int
    tokens: int
    failures: int
    restarts: int
    bytes_sent: int
    bytes_received: int
    push_seconds: float | None
    pushes: Distribution


class RemoteGauges(Struct, frozen=True, kw_only=True):
    """State of all remote inference servers. Totals count since the last start.

    tokens_sampled: of completed groups. requested_again: groups that were requested again from another server.
    """

    tokens_sampled: int = 0
    requested_again: int = 0
    servers: tuple[RemoteServerGauge, ...] = ()


def measured(gauges: Callable[[], RemoteGauges]) -> Callable[[float], Mapping[str, Any]]:
    """Return what measures servers for a line of metrics.jsonl; its argument is the seconds since the line before."""
    tokens: dict[str, int] = {}

    def measure(seconds: float) -> Mapping[str, Any]:
        nonlocal tokens
        servers, before = gauges().servers, tokens
        tokens = {one.name: one.tokens for one in servers}
        return {
            "remote_servers": {
                one.name: {key: getattr(one, key, None) for key in REMOTE_METRICS}
                | {"tokens_per_second": (one.tokens - before.get(one.name, 0)) / seconds if seconds > 0 else None}
                for one in servers
            }
        }

    return measure


def shown(servers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the state of all servers together, and those that cannot be used. servers: of a line of metrics.jsonl."""
    found = servers.values()
    rate = sum(one["tokens_per_second"] or 0.0 for one in found)
    lag = max((one["lag"] for one in found if one["lag"] is not None), default=None)
    moved = sum(one["bytes_sent"] + one["bytes_received"] for one in found)
    ready = sum(one["state"] == "ready" for one in found)
    yield (
        f"{ready} of {len(found)} servers ready, {rate:.0f} tokens/s, lag {number(lag, 'd')}, "
        f"{sum(one['rows'] for one in found)} sequences, {sum(one['restarts'] for one in found)} restarts, "
        f"{memory(moved)} moved"
    )
    yield from (f"{name} {one['state']}" for name, one in servers.items() if one["state"] != "ready")


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
