"""Attention over whole sequences: objects that replace KV caches while sequences go through a model of mlx-lm.

Models of mlx-lm build their attention mask and rotate queries and keys according to the cache of a layer, and pass the
cache to `scaled_dot_product_attention`, which they import by name. An object in place of a cache therefore decides
which tokens attend to which, at which positions, and how attention is computed.
"""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm import models
from mlx_lm.models import base
from mlx_lm.models.cache import create_attention_mask

from clotho.backend import backend

NAME = "scaled_dot_product_attention"
original = base.scaled_dot_product_attention


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Let the cache compute attention if it has a method `attend`. Name and arguments are mlx-lm's.

    `attend(queries, keys, values, scale=, mask=)` returns (B, heads, queries, size), or None if mlx-lm should compute
    attention.
    """
    own = getattr(cache, "attend", None) if sinks is None else None
    if own is not None:
        attended: mx.array | None = own(queries, keys, values, scale=scale, mask=mask)
        if attended is not None:
            return attended
    usual: mx.array = original(queries, keys, values, cache, scale, mask, sinks)
    return usual


def install_cache_attention() -> None:
    """Replace mlx-lm's function by `attention` in all of its model modules that are loaded, for good.

    Threads share these modules, so none may undo what another relies on.
    """
    for module in model_modules():
        if vars(module).get(NAME) is original:
            setattr(module, NAME, attention)


def model_modules() -> list[ModuleType]:
    """Return the modules of mlx-lm's models that are loaded."""
    return [module for module in list(vars(models).values()) if isinstance(module, ModuleType)]


KeysAndValues = tuple[mx.array, ...]


class LayerKeys:
    """Keys and values of one layer in one pass over the blocks, with the mask of causal attention.

    offset: position of the first token, one for all rows or one per row, (B,). held: keys and values, (B, heads, S,
    size) each, once the layer has computed them. They are nodes of the graph: nothing is copied, and gradients flow
    through.
    """

    offset: int | mx.array = 0
    held: KeysAndValues = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        """Store the keys and values of this pass; return those that its tokens attend to."""
        self.held = (keys, values)
        return self.held

    def keys_and_values(self) -> KeysAndValues:
        """Return the result of `update_and_fetch`; some layers use the keys and values of another layer."""
        return self.held

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return which keys each query attends to: (..., queries, keys) booleans, or "causal"."""
        mask: mx.array | str | None = create_attention_mask(tokens, 0, return_array, window_size)
        return mask

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | str | None
    ) -> mx.array | None:
        """Compute attention with the backend; None if mlx-lm should compute it."""
        return backend().attend(queries, keys, values, scale=scale, mask=mask)

    def holding(self, held: KeysAndValues) -> Self:
        """Return a copy with these keys and values."""
        other = copy.copy(self)
        other.held = held
        return other


def visible(distance_Q_K: mx.array, window_size: int | None) -> mx.array:
    """Whether a query attends to a key `distance` tokens before it: not in the future, and inside the window."""
    seen = distance_Q_K >= 0
    return seen if window_size is None else seen & (distance_Q_K < window_size)


class AttentionLayers(NamedTuple):
    """How the blocks of a model take keys and masks. caches: number of caches.

    mask_axes: 4 for (B, heads, queries, keys); 5 for models that compute scores with heads split into groups.
    """

    caches: int
    mask_axes: int

    def mask(self, mask_B_Q_K: mx.array) -> mx.array:
        """Reshape a mask per row to the axes of the model's attention scores."""
        B, Q, K = mask_B_Q_K.shape
        return mask_B_Q_K.reshape(B, *[1] * (self.mask_axes - 3), Q, K)
