"""The prefix cache: KV caches of prompts, reused by requests with the same beginning; LRU, never across versions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator

import mlx.core as mx
from msgspec import Struct

from clotho.cpu.interface import PromptState
from clotho.inference.cache_layout import CacheLayout

MAX_ENTRIES = 256

Key = tuple[int, tuple[int, ...]]
"""Policy version and tokens of a prompt."""


class PrefixHit(Struct, frozen=True, kw_only=True):
    """A state that covers the first `tokens` tokens of the requested prompt."""

    state: PromptState
    tokens: int


class PrefixCache:
    """Holds at most `capacity` tokens and at most `MAX_ENTRIES` prompts; capacity 0 disables it."""

    def __init__(self, layout: CacheLayout, capacity: int) -> None:
        self.tokens = 0
        self._layout = layout
        self._capacity = capacity
        self._entries: OrderedDict[Key, PromptState] = OrderedDict()
        self._sorted: list[Key] = []

    def find(self, version: int, tokens: tuple[int, ...]) -> PrefixHit | None:
        """Return the state that covers most of `tokens`: a whole entry, or the common prefix of one."""
        found = [(common_prefix(key[1], tokens), key) for key in self._candidates(version, tokens)]
        common, key = max(found, default=(0, (version, ())))
        if not common:
            return None
        state = self._entries[key] if common == len(key[1]) else self._layout.trimmed(self._entries[key], common)
        assert state is not None
        self._entries.move_to_end(key)
        return PrefixHit(state=state, tokens=common)

    def _candidates(self, version: int, tokens: tuple[int, ...]) -> Iterator[Key]:
        """Return the entries that may cover most of `tokens`: its neighbours in lexicographic order.

        If states cannot be truncated, only an entry that is a prefix of `tokens` counts; it precedes `tokens`.
        """
        if self._layout.right_padding_limit is None:
            at = bisect_left(self._sorted, (version, tokens))
            yield from (key for key in self._sorted[max(0, at - 1) : at + 1] if key[0] == version)
            return
        while (at := bisect_right(self._sorted, (version, tokens))) and self._sorted[at - 1][0] == version:
            entry = self._sorted[at - 1][1]
            common = common_prefix(entry, tokens)
            if common == len(entry):
                yield version, entry
                return
            tokens = tokens[:common]

    def store(self, version: int, tokens: tuple[int, ...], state: PromptState) -> None:
        """Store a copy of the state after `tokens`."""
        key = (version, tokens)
        if not tokens or len(tokens) > self._capacity or key in self._entries:
            return
        copied = tuple(tuple(mx.contiguous(array) for array in arrays) for arrays in state)
        mx.eval(copied)
        self._entries[key] = copied
        insort(self._sorted, key)
        self.tokens += len(tokens)
        while self.tokens > self._capacity or len(self._entries) > MAX_ENTRIES:
            oldest, _ = self._entries.popitem(last=False)
            self._sorted.remove(oldest)
            self.tokens -= len(oldest[1])

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self._sorted.clear()
        self.tokens = 0


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the length of the common prefix of `a` and `b`."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
