"""Attention as mlx-lm's models call it, with a say for the cache.

Those models pass their cache to `scaled_dot_product_attention`, which they import by name. A cache that has an
`attend` of its own is asked here, whatever the model; every other call goes where it went before.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
from mlx_lm.models import base

NAME = "scaled_dot_product_attention"
original = base.scaled_dot_product_attention


@runtime_checkable
class Attending(Protocol):
    """A cache that computes attention over what it holds."""

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
    ) -> mx.array | None:
        """Return (B, heads, queries, size), or None to have it computed as usual."""
        ...


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Ask the cache first; the name and the arguments are mlx-lm's."""
    if sinks is None and isinstance(cache, Attending):
        attended = cache.attend(queries, keys, values, scale=scale, mask=mask)
        if attended is not None:
            return attended
    usual: mx.array = original(queries, keys, values, cache, scale, mask, sinks)
    return usual


def let_caches_attend() -> None:
    """Put `attention` in the place of mlx-lm's function in all of its model modules loaded so far."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and vars(module).get(NAME) is original:
            setattr(module, NAME, attention)
