"""How a model decodes several rows in one step: the axes of its masks, and whether its rows can share prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from clotho.inference.cache_layout import AttentionLeaf, CacheLayout
from clotho.inference.kv_cache import BatchKVCache, ColumnState, LayerKVCache
from clotho.inference.rows import PrefilledPrompt
from clotho.models.attention import install_cache_attention
from protocols.errors import ModelError

MASK_AXES = (4, 5)
"""Axes of attention masks: (B, heads, queries, keys), or with heads split into groups."""


class _ProbedCache(LayerKVCache):
    """Records what the model does with its results. attended: queries, keys, values and masks of attention."""

    def __init__(self, columns: ColumnState, leaf: AttentionLeaf, rows: int) -> None:
        super().__init__(columns, leaf, rows)
        self.fetched: list[tuple[mx.array, mx.array]] = []
        self.masks: list[mx.array | None] = []
        self.windows: set[int | None] = set()
        self.attended: list[tuple[mx.array, mx.array, mx.array, Any]] = []

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Record the arrays that a layer takes."""
        self.fetched.append(super().keys_and_values())
        return self.fetched[-1]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Record the mask and the window that a layer asks for."""
        self.windows.add(window_size)
        self.masks.append(super().make_mask(N, return_array, window_size))
        return self.masks[-1]

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
    ) -> mx.array | None:
        """Record what a layer attends to, and let mlx-lm compute it."""
        self.attended.append((queries, keys, values, mask))
        return None

    def attends_plainly(self, masks: Sequence[mx.array | None]) -> bool:
        """Whether attention uses each result of this cache once, as it is, with a mask of a cache."""
        used = [(keys, values) for _, keys, values, _ in self.attended]
        as_fetched = len(used) == len(self.fetched) > 0 and all(
            any(keys is k and values is v for k, v in self.fetched) for keys, values in used
        )
        return as_fetched and all(any(mask is m for m in masks) for _, _, _, mask in self.attended)


def probe_batching(layout: CacheLayout) -> None:
    """Set what the layout says of rows of different lengths, from a step that is not evaluated. Raises ModelError."""
    heads = max((leaf.key_shape[0] for leaf in layout.leaves if isinstance(leaf, AttentionLeaf)), default=1)
    reason: Exception | None = None
    install_cache_attention()
    for layout.mask_axes in MASK_AXES:
        try:
            cache, shape = _probe(layout, rows=heads + 1)  # as many rows as heads would hide a wrong axis
        except ValueError as error:
            reason = error
            continue
        if shape[:2] == (heads + 1, 1):
            leaves = cache.leaves[:-1] if layout.mixtures else cache.leaves
            _read_probe(layout, [leaf for leaf in leaves if isinstance(leaf, _ProbedCache)])
            return
    raise ModelError(f"this model cannot decode several sequences at once: {reason}")


def _probe(layout: CacheLayout, rows: int) -> tuple[BatchKVCache, tuple[int, ...]]:
    cache = BatchKVCache(layout, rows, limit=4 * rows, layer_type=_ProbedCache)
    positions_B, live_B = np.arange(rows, dtype=np.int32) % 3, np.ones(rows, dtype=np.bool_)
    cache.make_room(positions_B, live_B, [PrefilledPrompt(rows=1, tokens=2, state=None, reserved=4)])
    cache.begin(positions_B, live_B)
    logits = layout.compute(mx.zeros((rows, 1), dtype=mx.int32), cache.nested)
    return cache, tuple(logits.shape)


def _read_probe(layout: CacheLayout, caches: Sequence[_ProbedCache]) -> None:
    """Set whether prompts can be shared, and the number of query heads, if attention takes keys and masks as given."""
    masks = [mask for cache in caches for mask in cache.masks]
    plain = [cache.attends_plainly(masks) for cache in caches]
    heads = {queries.shape[1] for cache in caches for queries, *_ in cache.attended}
    layout.query_heads = heads.pop() if all(plain) and len(heads) == 1 else None
    whole = [cache.columns.window is None for cache in caches]
    layout.shares_prompts = any(whole) and all(
        is_plain and cache.windows <= {None}
        for cache, is_plain, is_whole in zip(caches, plain, whole, strict=True)
        if is_whole
    )
