"""One inference server as the sampler sees it, with state and metrics; and the choice between servers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Protocol

import anyio

from attachments.remote.gauges import RemoteServerGauge
from attachments.remote.messages import RolloutAnswer, ServedPolicy
from attachments.remote.server import Traffic
from attachments.remote.weights import Weights
from protocols.sampling import SampleRequest
from protocols.summary import Distribution

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
