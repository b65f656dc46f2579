"""Whether a model decodes several rows of different lengths at once, found out before the first request."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from clotho.inference.batch_cache import BatchCache
from clotho.inference.cache_layout import AttentionLeaf, CacheLayout
from clotho.inference.row_caches import Arrival
from protocols.errors import ModelError

MASK_AXES = (4, 5)
"""(B, heads, queries, keys), and the same with heads split into groups, as some models keep their scores."""


def probe_batching(layout: CacheLayout) -> None:
    """Build, without evaluating it, a step of rows of different lengths; settle the shape of the model's masks.

    Raises ModelError if the model cannot take it.
    """
    heads = max((leaf.key_shape[0] for leaf in layout.leaves if isinstance(leaf, AttentionLeaf)), default=1)
    reason: Exception | None = None
    for layout.mask_axes in MASK_AXES:
        try:
            shape = _step_shape(layout, rows=heads + 1)  # as many rows as heads would hide a mask on the wrong axis
        except ValueError as error:
            reason = error
            continue
        if shape[:2] == (heads + 1, 1):
            return
    raise ModelError(f"this model cannot decode several sequences at once: {reason}")


def _step_shape(layout: CacheLayout, rows: int) -> tuple[int, ...]:
    cache = BatchCache(layout, rows)
    positions_B, live_B = np.arange(rows, dtype=np.int32) % 3, np.ones(rows, dtype=np.bool_)
    cache.make_room(positions_B, live_B, [Arrival(rows=1, tokens=2, state=None)])
    cache.begin(positions_B, live_B)
    logits: mx.array = layout.model(mx.zeros((rows, 1), dtype=mx.int32), cache=cache.nested)
    return tuple(logits.shape)
