"""What is measured in a simulated run: times of workers by state, counts, and what limited the throughput."""

from __future__ import annotations

from typing import Literal

import simpy
from msgspec import Struct

State = Literal["decoding", "weights", "idle", "failed"]
Bottleneck = Literal["learner", "workers", "network", "batches ahead", "event loop", "rewards", "failures"]

SATURATED = 0.9
"""A resource that is used for this share of the time is the bottleneck."""


class Forecast(Struct, frozen=True, kw_only=True):
    """What a simulated run does after its warm-up.

    Shares of time of a worker: decoding; waiting for weights; idle, as no group may start; failed. rows: mean number of
    rows of a worker that decodes. learner_busy, network_busy, loop_busy, rewards_busy: shares of time; network: of the
    learner's link. staleness_mean, staleness_p95: of the groups that were trained on, in versions. stale: share of
    groups that were discarded for `max_staleness`. prompted, trained, discarded, in_flight: groups of the whole run.
    """

    workers: int
    max_batches_ahead: int
    groups_per_second: float
    updates_per_second: float
    tokens_per_second: float
    decoding: float
    waiting_for_weights: float
    idle: float
    failed: float
    rows: float
    learner_busy: float
    network_busy: float
    loop_busy: float
    rewards_busy: float
    staleness_mean: float
    staleness_p95: float
    stale: float
    bottleneck: Bottleneck
    prompted: int
    trained: int
    discarded: int
    in_flight: int
    requested_again: int


class Tally:
    """Integrals over time of the number of workers by state and of the rows, and counters."""

    def __init__(self, env: simpy.Environment, workers: int) -> None:
        self._env, self._moment = env, env.now
        self.number: dict[str, int] = {"decoding": 0, "weights": 0, "idle": workers, "failed": 0, "rows": 0}
        self.seconds = dict.fromkeys(self.number, 0.0)
        self.counts = dict.fromkeys(("ended", "updates", "tokens", "stale"), 0)

    def advance(self) -> None:
        """Add the time since the last change."""
        elapsed, self._moment = self._env.now - self._moment, self._env.now
        if elapsed > 0.0:
            for name, number in self.number.items():
                self.seconds[name] += elapsed * number

    def reset(self) -> None:
        """Begin the measurement."""
        self.advance()
        self.seconds = dict.fromkeys(self.number, 0.0)
        self.counts = dict.fromkeys(self.counts, 0)


def bottleneck(used: dict[str, float], shares: dict[str, float]) -> Bottleneck:
    """Name what limits the throughput.

    A saturated resource is named first: learner, event loop, rewards. Otherwise the learner waits for groups, and what
    the workers do most of the time is named: they decode, they wait for weights, no group may start, or they failed.
    """
    saturated: tuple[tuple[str, Bottleneck], ...] = (
        ("learner", "learner"),
        ("loop", "event loop"),
        ("rewards", "rewards"),
    )
    for name, found in saturated:
        if used[name] >= SATURATED:
            return found
    names: dict[str, Bottleneck] = {
        "decoding": "workers",
        "weights": "network",
        "idle": "batches ahead",
        "failed": "failures",
    }
    return names[max(shares, key=lambda name: shares[name])]
