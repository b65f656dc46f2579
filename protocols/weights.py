"""Broadcaster -> everyone who samples: which weights serve now. A newest-wins cell, never a queue."""

from __future__ import annotations

from msgspec import Struct


class WeightsReady(Struct, frozen=True, kw_only=True, tag=True):
    """Broadcaster -> generator, evaluator, gateway.

    version: number of updates applied to the policy since its run began; 0 is the base policy.
    step: number of batches consumed; a batch that teaches nothing advances `step` but not `version`.
    fingerprint: of the trainable weights; equal weights have equal fingerprints.
    """

    version: int
    step: int
    fingerprint: str


class SwapTimes(Struct, frozen=True, kw_only=True):
    """Broadcaster -> gauges. Seconds that putting new weights in service took; 0 where there was no swap yet."""

    count: int = 0
    last: float = 0.0
    median: float = 0.0
    longest: float = 0.0
