"""Which caches a model makes, and how a computed prompt's is taken apart into plain arrays, one entry per cache.

mlx-lm's single-sequence caches compute prompts; `BatchCache` holds the running rows. Both are lists that mirror the
model's layers; here they are flattened: a `CacheList` (hybrid layers) contributes its members in order.

What the batch asks of the caches of its rows, wherever they are computed.

The model as it serves: without dropout, also while the learner has it in training mode between two turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from msgspec import Struct
from numpy.typing import NDArray

from protocols.errors import ModelError


class AttentionLeaf(Struct, frozen=True, kw_only=True):
    """A key-value cache. Shapes without batch and tokens: (heads, size). window: tokens it keeps; None = all."""

    window: int | None
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: mx.Dtype


class StateLeaf(Struct, frozen=True, kw_only=True):
    """A fixed-size state (convolution, state space): one array per entry, shapes without batch."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]


Leaf = AttentionLeaf | StateLeaf
PromptState = tuple[tuple[mx.array, ...], ...]
"""A computed prompt: per leaf, (keys, values) of shape (1, heads, tokens, size), or the state's arrays."""


class CacheLayout:
    """The caches of one model, read off a forward pass of one token that is never evaluated.

    mask_axes: settled by `probe_batching`. Raises ModelError for a kind of cache that rows cannot share a batch with.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        cache = self.fresh()
        model(mx.zeros((1, 1), dtype=mx.int32), cache=cache)
        self.mask_axes = 4
        self.leaves = tuple(_leaf(c) for c in flatten(cache))
        self._nested = tuple(len(c.caches) if isinstance(c, CacheList) else 0 for c in cache)

    def fresh(self) -> list[Any]:
        """Make the model's own empty cache for computing a prompt."""
        return list(make_prompt_cache(self.model))

    @property
    def right_padding_limit(self) -> int | None:
        """Longest prompt up to which prompts of unequal length may be padded on the right and computed together.

        None: any. Causal attention ignores what follows; a state does not (0), nor a window that padding fills.
        """
        if any(isinstance(leaf, StateLeaf) for leaf in self.leaves):
            return 0
        windows = [leaf.window for leaf in self.leaves if isinstance(leaf, AttentionLeaf) and leaf.window is not None]
        return min(windows, default=None)

    def nest(self, flat: Sequence[Any]) -> list[Any]:
        """Arrange flat caches as the model's layers expect them."""
        rest = iter(flat)
        return [_hybrid([next(rest) for _ in range(n)]) if n else next(rest) for n in self._nested]

    def extract(self, cache: Sequence[Any], row: int, tokens: int) -> PromptState:
        """Take one row's first `tokens` tokens out of a computed cache; lazy slices, nothing is copied."""
        return tuple(_extracted(c, row, tokens) for c in flatten(cache))

    def restore(self, state: PromptState, tokens: int) -> list[Any]:
        """Make a cache of the model's own kind from a state of `tokens` tokens, to be continued."""
        cache = self.fresh()
        for c, arrays in zip(flatten(cache), state, strict=True):
            if isinstance(c, ArraysCache):
                set_state(c, [mx.array(a) for a in arrays])
            else:
                c.keys, c.values = (mx.array(a) for a in arrays)
                c.offset = tokens
                if isinstance(c, RotatingKVCache):
                    c._idx = c.keys.shape[2]
        return cache

    def trimmed(self, state: PromptState, tokens: int) -> PromptState | None:
        """Return the state after only the first `tokens` tokens, or None where it cannot be undone."""
        if self.right_padding_limit is not None:
            return None
        return tuple(tuple(a[:, :, :tokens] for a in arrays) for arrays in state)


def _hybrid(members: list[Any]) -> Any:
    hybrid: Any = CacheList
    return hybrid(*members)


def set_state(cache: ArraysCache, arrays: list[mx.array]) -> None:
    """Replace the arrays of a state; mlx-lm declares them as nothing but None."""
    held: Any = cache
    held.cache = arrays


def get_state(cache: ArraysCache) -> list[mx.array]:
    """Return the arrays of a state. Raises ModelError if the model left one unset."""
    held: list[Any] = cache.cache
    if any(array is None for array in held):
        raise ModelError("this model leaves part of its state unset after the first token: its rows cannot be batched")
    return held


def flatten(cache: Sequence[Any]) -> list[Any]:
    """List the caches of all layers, members of a `CacheList` in its place."""
    return [leaf for c in cache for leaf in (c.caches if isinstance(c, CacheList) else (c,))]


def _leaf(cache: Any) -> Leaf:
    if isinstance(cache, ArraysCache):
        return StateLeaf(
            shapes=tuple(tuple(a.shape[1:]) for a in get_state(cache)), dtypes=tuple(a.dtype for a in get_state(cache))
        )
    if type(cache) not in (KVCache, RotatingKVCache) or (type(cache) is RotatingKVCache and cache.keep):
        raise ModelError(f"this model's cache ({type(cache).__name__}) cannot hold several sequences at once")
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    keys, values = cache.keys, cache.values
    return AttentionLeaf(
        window=window,
        key_shape=(keys.shape[1], keys.shape[3]),
        value_shape=(values.shape[1], values.shape[3]),
        dtype=keys.dtype,
    )


def _extracted(cache: Any, row: int, tokens: int) -> tuple[mx.array, ...]:
    if isinstance(cache, ArraysCache):
        return tuple(a[row : row + 1] for a in get_state(cache))
    keys, values = cache.keys, cache.values
    if isinstance(cache, RotatingKVCache):
        in_order: Any = cache._temporal_order
        keys, values = in_order(keys), in_order(values)
        if cache.offset > tokens:  # right padding, which never fills the window
            return keys[row : row + 1, :, :tokens], values[row : row + 1, :, :tokens]
        kept = min(tokens, cache.max_size)
        return keys[row : row + 1, :, -kept:], values[row : row + 1, :, -kept:]
    return keys[row : row + 1, :, :tokens], values[row : row + 1, :, :tokens]


Numbers = mx.array | NDArray[np.float32]
"""Logits, on the device or on the host."""


class Arrival(NamedTuple):
    """A computed prompt of `tokens` tokens for so many rows to come. state: None before the first token."""

    rows: int
    tokens: int
    state: PromptState | None


class RowCaches(Protocol):
    """Caches of numbered slots, and the step that reads and writes all of them."""

    @property
    def tokens(self) -> int:
        """Tokens that the largest buffers have room for, prompts that rows share included."""
        ...

    @property
    def arrays(self) -> Sequence[mx.array]:
        """What MLX has to compute with each step."""
        ...

    def has_room(self, arrivals: Sequence[Arrival]) -> bool:
        """Say whether prompts fit before the current column as it is."""
        ...

    def make_room(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], arrivals: Sequence[Arrival]) -> None:
        """See to it that prompts fit before the current column, beside live rows of `positions_B` tokens."""
        ...

    def enter(self, slots: Sequence[int], arrival: Arrival) -> None:
        """Put a computed prompt into slots, for which there is room."""
        ...

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens; give back columns that none needs."""
        ...

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        ...

    def clear(self, slot: int) -> None:
        """Zero one slot: what is not finite must not reach later rows."""
        ...

    def logits(
        self, token_B: mx.array | NDArray[np.int32], positions_B: NDArray[np.int32], due_B: NDArray[np.bool_]
    ) -> Numbers:
        """Compute a step in which every row adds one token after the `positions_B` it has; (B, V), the caller's.

        Rows that are not due are computed in vain.
        """
        ...


@contextmanager
def serving(model: nn.Module) -> Iterator[None]:
    """Evaluate inside, and put the model back into training mode after if it was."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
