"""Attention over whole sequences: objects that replace KV caches while sequences go through a model of mlx-lm.

Models of mlx-lm build their attention mask and rotate queries and keys according to the cache of a layer, and pass the
cache to `scaled_dot_product_attention`, which they import by name. An object in place of a cache therefore decides
which tokens attend to which, at which positions, and how attention is computed.
"""

from __future__ import annotations

import copy
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import models
from mlx_lm.models import base
from mlx_lm.models.cache import create_attention_mask

from clotho.backend import backend
from clotho.models.blocked_attention import VisibleKeys, blocked_attention, causal, queries_at_once

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
    attention. Whole sequences, which have `LayerKeys` or no cache, are computed in blocks if they are long.
    """
    given = () if sinks is None else (sinks,)
    if cache is None or isinstance(cache, LayerKeys):
        Q, S = queries.shape[2], keys.shape[2]
        if queries_at_once(Q, S) < Q and _is_divisible(mask, Q, S):
            seen = causal(Q, S) if isinstance(mask, str) else mask
            attend = partial(_attention, LayerKeys(), scale)
            return blocked_attention(attend, queries, keys, values, *given, mask=seen)
    return _attention(cache, scale, queries, keys, values, *given, mask=mask)


def _is_divisible(mask: Any, Q: int, S: int) -> bool:
    """Whether the mask has no gradient, and a row for each query."""
    if isinstance(mask, mx.array):
        return mask.dtype == mx.bool_ and mask.shape[-2:] == (Q, S)
    return isinstance(mask, VisibleKeys) or mask == "causal"


def _attention(
    cache: Any, scale: float, queries: mx.array, keys: mx.array, values: mx.array, *sinks: mx.array, mask: Any
) -> mx.array:
    mask = mask.whole if isinstance(mask, VisibleKeys) else mask
    own = None if sinks else getattr(cache, "attend", None)
    attended: mx.array | None = None if own is None else own(queries, keys, values, scale=scale, mask=mask)
    if attended is None:
        attended = original(queries, keys, values, cache, scale, mask, *sinks)
    return attended


def install_cache_attention() -> None:
    """Let all loaded models of mlx-lm use `attention`, for good, because threads share their modules."""
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

    def __init__(self, layers: AttentionLayers | None = None) -> None:
        """layers: how the blocks take masks; by default arrays with 4 axes."""
        self._layers = AttentionLayers((0,), 4) if layers is None else layers

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        """Store the keys and values of this pass; return those that its tokens attend to."""
        self.held = (keys, values)
        return self.held

    def keys_and_values(self) -> KeysAndValues:
        """Return the result of `update_and_fetch`; some layers use the keys and values of another layer."""
        return self.held

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | VisibleKeys | str | None:
        """Return which keys each query attends to: (..., queries, keys) booleans, `VisibleKeys`, or "causal"."""
        mask: mx.array | str | None = create_attention_mask(tokens, 0, return_array, window_size)
        if isinstance(mask, mx.array) and self._layers.mask_axes is None:
            return causal(tokens, tokens, window_size)
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


class AttentionLayers(NamedTuple):
    """How the blocks of a model take keys and masks.

    caches: for each layer, the number of arrays of its state if it is recurrent (`LayerState`), and 0 if it has keys;
    a tuple of such numbers if it has several caches. mask_axes: None if the blocks pass masks to `attention` as they
    are; otherwise the number of axes of an array: 4 for (B, heads, queries, keys); 5 for models that compute scores
    with heads split into groups. gap: number of columns between the sequences of a packed row: the tokens that
    convolutions look back, at least 1; 0 without such layers.
    """

    caches: tuple[Any, ...]
    mask_axes: int | None
    gap: int = 0

    def mask(self, visible: VisibleKeys) -> VisibleKeys | mx.array:
        """Return the mask as the blocks take it."""
        if self.mask_axes is None:
            return visible
        B, _, Q, S = visible.whole.shape
        return visible.whole.reshape(B, *[1] * (self.mask_axes - 3), Q, S)


class ResetState(Enum):
    """In place of the state of a recurrent layer: 0 before the first token, and after tokens that the mask excludes."""

    AT_MASK = 0


class LayerState(LayerKeys):
    """State of a recurrent layer after a pass over the blocks, in place of mlx-lm's `ArraysCache`.

    held: the arrays of the state, (B, ...) each; none before the first token of the sequences. lengths: numbers of
    tokens that belong to the sequences, (B,); what follows is padding and does not change the state. None: all tokens.
    """

    lengths: mx.array | None = None

    def __init__(self, arrays: int, length_B: mx.array | None = None) -> None:
        """arrays: how many arrays the state has."""
        super().__init__()
        self._arrays = arrays
        self.lengths = length_B

    def __getitem__(self, index: int) -> mx.array | ResetState | None:
        if index >= self._arrays:
            raise IndexError(index)  # ends an iteration
        return self.held[index] if self.held else None

    def __setitem__(self, index: int, array: mx.array) -> None:
        held: list[Any] = list(self.held) or [None] * self._arrays
        held[index] = array
        self.held = tuple(held)

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Return which tokens change the state, (B, S) booleans; None if all do."""
        return None if self.lengths is None else mx.arange(tokens) < self.lengths[:, None]

    def advance(self, tokens: int) -> None:
        """Do nothing: a pass computes all tokens of its sequences."""


LayerCaches = list[Any]
"""What replaces the caches of the blocks: `LayerKeys`, or a tuple of them for a layer with several caches."""


def layer_caches(layers: AttentionLayers, length_B: mx.array | None = None) -> LayerCaches:
    """Return what replaces the caches of the blocks in a pass over new sequences. length_B: see `LayerState`."""
    caches: LayerCaches = tree_map(
        lambda arrays: LayerState(arrays, length_B) if arrays else LayerKeys(layers), list(layers.caches)
    )
    return caches
