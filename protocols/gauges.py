"""Everyone who can be measured -> monitor: numbers to be looked at whenever somebody looks."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class MailboxGauge(Struct, frozen=True, kw_only=True):
    """How full an arrow is, in messages."""

    name: str
    depth: int
    capacity: int


class RunGauges(Struct, frozen=True, kw_only=True):
    """The run at one moment. Totals count since this process began; None where nothing was measured yet.

    tokens_sampled, decode_seconds: totals of the decode engine, API requests included.
    decode_rate_idle, decode_rate_learning: tokens per second of decoding alone, and while the learner has work.
    rows_running: sequences being decoded. api_requests: total. swaps: updates that were put in service; last, median
    and longest took so many seconds. peak_memory_bytes: of arrays held at once.
    """

    mailboxes: tuple[MailboxGauge, ...] = ()
    tokens_sampled: int = 0
    decode_seconds: float = 0.0
    decode_rate_idle: float | None = None
    decode_rate_learning: float | None = None
    rows_running: int = 0
    api_requests: int = 0
    swaps: int = 0
    swap_seconds_last: float | None = None
    swap_seconds_median: float | None = None
    swap_seconds_max: float | None = None
    peak_memory_bytes: int = 0


Gauges = Callable[[], RunGauges]
"""Reads the gauges; called from any thread, returns at once."""
