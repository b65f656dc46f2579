"""Whether a model decodes several rows of different lengths at once, found out before the first request.

What running rows make of tokens that are given to them instead of sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from clotho.inference.cache_layout import Arrival, AttentionLeaf, CacheLayout, PromptState, RowCaches, serving
from clotho.inference.kv_cache import BatchCache
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


def forced_logits(
    layout: CacheLayout,
    make_caches: Callable[[int], RowCaches],
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    rows: int,
) -> Iterator[mx.array]:
    """Compute the logits before each of `tokens`, (rows, V), evaluated, as a batch of equal rows of its own."""
    *before, last = prompt
    caches = make_caches(rows)
    positions_B, all_B = np.full(rows, len(before), dtype=np.int32), np.ones(rows, dtype=np.bool_)
    arrival = Arrival(rows=rows, tokens=len(before), state=_state(layout, before))
    caches.make_room(positions_B, ~all_B, [arrival])
    caches.enter(range(rows), arrival)
    for token in (last, *tokens[:-1]):
        logits_B_V = mx.array(caches.logits(np.full(rows, token, dtype=np.int32), positions_B, all_B))
        mx.eval(logits_B_V, *caches.arrays)
        yield logits_B_V
        positions_B = positions_B + 1


def _state(layout: CacheLayout, tokens: Sequence[int]) -> PromptState | None:
    if not tokens:
        return None
    cache = layout.fresh()
    with serving(layout.model):
        layout.model(mx.array([list(tokens)]), cache=cache)
    state = layout.extract(cache, 0, len(tokens))
    mx.eval(state)
    return state
