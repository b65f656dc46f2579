"""Computed prompts kept for requests that begin alike, least recently used out first, never across versions."""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx
from msgspec import Struct

from actors.compute.engine.layout import CacheLayout, PromptState

MOST_ENTRIES = 256


class PrefixHit(Struct, frozen=True, kw_only=True):
    """A state that covers the first `tokens` tokens of the prompt asked for."""

    state: PromptState
    tokens: int


class PrefixCache:
    """At most `capacity` tokens of computed prompts, and at most 256 of them; 0 keeps nothing."""

    def __init__(self, layout: CacheLayout, capacity: int) -> None:
        self.tokens = 0
        self._layout = layout
        self._capacity = capacity
        self._entries: OrderedDict[tuple[int, tuple[int, ...]], PromptState] = OrderedDict()

    def find(self, version: int, tokens: tuple[int, ...]) -> PrefixHit | None:
        """Return the state that covers most of `tokens`: an entry that begins it, or the common start of one."""
        best: PrefixHit | None = None
        key: tuple[int, tuple[int, ...]] | None = None
        for (entry_version, entry), state in self._entries.items():
            if entry_version != version:
                continue
            common = common_prefix(entry, tokens)
            if common <= (best.tokens if best else 0):
                continue
            usable = state if common == len(entry) else self._layout.trimmed(state, common)
            if usable is not None:
                best, key = PrefixHit(state=usable, tokens=common), (entry_version, entry)
        if key is not None:
            self._entries.move_to_end(key)
        return best

    def keep(self, version: int, tokens: tuple[int, ...], state: PromptState) -> None:
        """Remember the state after `tokens`, in memory of its own."""
        key = (version, tokens)
        if not tokens or len(tokens) > self._capacity or key in self._entries:
            return
        copied = tuple(tuple(mx.contiguous(array) for array in arrays) for arrays in state)
        mx.eval(copied)
        self._entries[key] = copied
        self.tokens += len(tokens)
        while self.tokens > self._capacity or len(self._entries) > MOST_ENTRIES:
            (_, oldest), _ = self._entries.popitem(last=False)
            self.tokens -= len(oldest)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.tokens = 0


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Count the tokens in which `a` and `b` begin alike."""
    least = min(len(a), len(b))
    if a[:least] == b[:least]:
        return least
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
