"""What running rows make of tokens that are given to them instead of drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from clotho.inference.cache_layout import CacheLayout, PromptState
from clotho.inference.row_caches import Arrival, RowCaches
from clotho.inference.serving import serving


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
