"""What stands in for key-value caches while whole sequences go through the blocks of a model of mlx-lm.

Those models build their attention mask, and rotate queries and keys, by what the cache of a layer says; so an object
in a cache's place decides what attends to what, and from which position on, in all of them.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Self

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from clotho.cpu import computes_on_host
from clotho.cpu.layers import attend

KeysAndValues = tuple[mx.array, ...]


class LayerKeys:
    """Keys and values of one layer in one pass over the blocks, and its mask; here that of plain causal attention.

    offset: position of the first token, of all rows or of each, (B,). held: keys and values, (B, heads, S, size) each,
    once the layer has computed them, as nodes of the graph: nothing is copied, and gradients flow through them.
    """

    offset: int | mx.array = 0
    held: KeysAndValues = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        """Take the keys and values of the tokens of this pass; return those that they attend to."""
        self.held = (keys, values)
        return self.held

    def keys_and_values(self) -> KeysAndValues:
        """Return what `update_and_fetch` returned: some layers use the keys and values of another one."""
        return self.held

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return which keys each of so many queries attends to: (..., queries, keys) booleans, or "causal"."""
        mask: mx.array | str | None = create_attention_mask(tokens, 0, return_array, window_size)
        return mask

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | str | None
    ) -> mx.array | None:
        """Attention over the keys given, or None to have it computed as usual: see `clotho.models.attention`."""
        return attend(queries, keys, values, scale=scale, mask=mask) if computes_on_host() else None

    def holding(self, held: KeysAndValues) -> Self:
        """Return a copy that holds these keys and values."""
        other = copy.copy(self)
        other.held = held
        return other


def visible(distance_Q_K: mx.array, window_size: int | None) -> mx.array:
    """Whether a query sees a key so many tokens before it: not in the future, not out of the window."""
    seen = distance_Q_K >= 0
    return seen if window_size is None else seen & (distance_Q_K < window_size)


class AttentionLayers(NamedTuple):
    """How the blocks of a model take keys and masks: so many caches, and masks of so many axes.

    mask_axes: 4 for (B, heads, queries, keys); 5 for models that keep scores with heads split into groups.
    """

    caches: int
    mask_axes: int

    def mask(self, mask_B_Q_K: mx.array) -> mx.array:
        """Give a mask per row the axes of the model's attention scores."""
        B, Q, K = mask_B_Q_K.shape
        return mask_B_Q_K.reshape(B, *[1] * (self.mask_axes - 3), Q, K)
