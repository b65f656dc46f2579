"""What the engine has done and is doing."""

from __future__ import annotations

from msgspec import Struct


class EngineStats(Struct, frozen=True, kw_only=True):
    """Gauges of now, and counts since the engine was made.

    running_rows, waiting_rows: completions being decoded, and those that are not yet.
    cache_tokens: tokens for which the running rows' caches have memory; prefix_cache_tokens: kept prompts.
    tokens_drawn: reported, so without wasted draws. prefill_tokens: prompt tokens computed, padding not counted.
    ticks: turns with a decode step. finished: completions by finish reason. failed: requests that failed.
    listener_errors: requests given up because their listener raised.
    """

    running_rows: int
    waiting_rows: int
    cache_tokens: int
    prefix_cache_tokens: int
    tokens_drawn: int
    prefill_tokens: int
    prefix_hits: int
    prefix_misses: int
    ticks: int
    finished: dict[str, int]
    failed: int
    listener_errors: int
