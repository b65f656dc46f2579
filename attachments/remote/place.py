"""One inference server as the sampler sees it, its state and metrics, and the choice between servers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol

import anyio
from msgspec import Struct
from prometheus_client.core import Metric, StateSetMetricFamily

from attachments.remote.messages import RolloutAnswer, ServedPolicy
from attachments.remote.sections import REMOTE_METRICS
from attachments.remote.server import Traffic
from attachments.remote.weights import Weights
from clotho.serving.metrics import counter, gauges, histogram
from protocols.compute import Distribution
from protocols.sampling import SampleRequest
from training_run.records.terminal_text import memory, number


class RemoteServerGauge(Struct, frozen=True, kw_only=True):
    """State of a remote inference server. Totals count since the last start; None means that it gets no groups.

    The fields are those of `REMOTE_METRICS`. tokens: of the groups that it has completed. restarts: how often another
    process than before has answered. pushes: distribution of `push_seconds`.
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


GAUGES = {
    "weights_version": ("version", "Policy version that a server in use serves."),
    "lag_versions": ("lag", "Versions that a server in use is behind the run."),
    "rows": ("rows", "Completions in flight on a server."),
}
COUNTERS = {
    "groups": ("groups", "Groups requested from a server."),
    "tokens": ("tokens", "Tokens of the groups that a server has completed."),
    "failures": ("failures", "Failed attempts and groups of a server."),
    "restarts": ("restarts", "Restarts of a server."),
    "sent_bytes": ("bytes_sent", "Weights and requests for a server."),
    "received_bytes": ("bytes_received", "Answers of a server."),
}
"""What /metrics shows of each server, behind `clotho_remote_server_`: a field and what it is."""


def server_metrics(remote: RemoteGauges) -> Iterator[Metric]:
    """Yield the state of each server."""
    servers = remote.servers
    if not servers:
        return
    state = StateSetMetricFamily("clotho_remote_server_state", "State of an inference server.", labels=["server"])
    for one in servers:
        state.add_metric([one.name], {name: one.state == name for name in ("ready", "updating", "failed")})
    yield state
    for table, make in ((GAUGES, gauges), (COUNTERS, counter)):
        for name, (field, help_text) in table.items():
            values = {one.name: value for one in servers if (value := getattr(one, field)) is not None}
            yield make(f"clotho_remote_server_{name}", help_text, values, by="server")
    again = {"": remote.requested_again}
    yield counter("clotho_remote_groups_requested_again", "Groups requested again elsewhere.", again)
    pushes = {one.name: one.pushes for one in servers}
    yield histogram("clotho_remote_server_push_seconds", "Time until a server served new weights.", pushes, "server")


PUSH_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Bounds of the histogram of push latencies, in seconds."""


class InferenceServer(Protocol):
    """A server that samples with the weights that it was given. Its methods raise RemoteFailure if it fails.

    name: for logs and metrics. restarts: new weights need a restart, which requests in flight do not survive.
    """

    @property
    def name(self) -> str:
        """The address without credentials."""
        ...

    @property
    def restarts(self) -> bool:
        """Whether new weights need a restart."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes that were exchanged."""
        ...

    async def served(self) -> ServedPolicy:
        """Return the policy that the server samples from."""
        ...

    async def push(self, weights: Weights) -> ServedPolicy:
        """Have the server sample with weights, and return the policy that it samples from now."""
        ...

    async def sample(self, request: SampleRequest) -> RolloutAnswer:
        """Return one completion per seed. Raises RequestError if the server refuses the request."""
        ...

    async def close(self) -> None:
        """Close the connections, and end what was started for this server."""
        ...


class Place:
    """A server, its state and its requests in flight.

    share: relative part of the rows that the server gets. version: served weights; None while the server gets no
    groups. failures: failed attempts since the last good one.
    owned: it serves weights that this run sent. probed_at: time of the last probe that it passed. instance: of the
    process that answered last. groups, tokens, all_failures, restarts, push_seconds (of the last push): for metrics.
    """

    def __init__(self, server: InferenceServer, share: float) -> None:
        self.server, self.share = server, share
        self.version: int | None = None
        self.rows = 0
        self.calls: set[anyio.CancelScope] = set()
        self.failures = 0
        self.owned = False
        self.probed_at = -math.inf
        self.instance = ""
        self.groups = self.tokens = self.all_failures = self.restarts = 0
        self.push_seconds: float | None = None
        self._pushes, self._total_push_seconds = [0] * (len(PUSH_BOUNDS) + 1), 0.0

    def pushed(self, seconds: float) -> None:
        """Record the time until the server served new weights."""
        self.push_seconds = seconds
        self._pushes[bisect_left(PUSH_BOUNDS, seconds)] += 1
        self._total_push_seconds += seconds

    def answered(self, instance: str) -> None:
        """Record which process has answered."""
        self.restarts += bool(self.instance) and instance != self.instance
        self.instance = instance

    @property
    def in_use(self) -> bool:
        """Whether it gets groups, or completes groups before it is restarted."""
        return self.version is not None or bool(self.calls)

    def gauge(self, newest: int) -> RemoteServerGauge:
        """Return the metrics. newest: the version that this process serves."""
        return RemoteServerGauge(
            name=self.server.name,
            state="ready" if self.version is not None else "failed" if self.failures else "updating",
            version=self.version,
            lag=None if self.version is None else max(0, newest - self.version),
            rows=self.rows,
            groups=self.groups,
            tokens=self.tokens,
            restarts=self.restarts,
            bytes_sent=self.server.traffic.sent,
            bytes_received=self.server.traffic.received,
            failures=self.all_failures,
            push_seconds=self.push_seconds,
            pushes=Distribution(bounds=PUSH_BOUNDS, counts=tuple(self._pushes), total=self._total_push_seconds),
        )

    def close(self) -> None:
        """Give the server no further groups, and take back its groups in flight."""
        self.version, self.probed_at = None, -math.inf
        for scope in self.calls:
            scope.cancel()


def freest(places: Iterable[Place], *, oldest: int, waiting: int) -> Place | None:
    """Return the place with the fewest rows in relation to its share, of those that serve version `oldest` or newer.

    waiting: rows that have no place. None if groups have to wait: no place is current, or each current place has its
    share of all rows. The first server that gets new weights would otherwise take all groups that wait for them.
    """
    used = [place for place in places if place.version is not None]
    current = [place for place in used if place.version is not None and place.version >= oldest]
    if not current:
        return None
    best = min(current, key=lambda place: place.rows / place.share)
    rows, shares = waiting + sum(place.rows for place in used), sum(place.share for place in used)
    return best if best.rows * shares < rows * best.share else None
