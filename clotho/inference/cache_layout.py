"""The KV cache layout of a model: which caches its layers need, and their conversion to and from plain arrays.

Prefill uses mlx-lm's caches for single sequences; `BatchKVCache` holds those of the running rows. Both are lists that
mirror the model's layers. Here they are flattened: a `CacheList` (hybrid layers) contributes its members in order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from clotho.inference.kv_format import PLAIN, KVFormat
from clotho.inference.rows import PrefilledPrompt, PromptState, RouteArray, RowAdapter
from clotho.models.experts import Mixtures
from protocols.errors import ModelError

MIN_SAVED_BYTES = {"cpu": 2**21, "gpu": 2**23}
"""Minimum number of bytes of keys and values per layer that shared prompts must save in a step: rows beyond the first x
tokens x bytes of a token, summed over the prompts that join.

Shared prompts need eleven more kernels per layer. On the CPU device, steps take equally long at about 2 MiB, and 12 %
less time at 7 MiB (4 prompts of 256 tokens x 8 rows, 6 layers of width 256). The value for a GPU is computed: on an M4
Max, eleven kernels of 2 microseconds take as long as reading 8 MiB at 70 % of the bandwidth; on an M3, 1.5 MiB.
"""


class AttentionLeaf(Struct, frozen=True, kw_only=True):
    """A KV cache. Shapes exclude batch and tokens: (heads, size). window: number of tokens it keeps; None = all.

    dtype: of keys and values as they are computed. format: how the caches of running rows hold them.
    """

    window: int | None
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: mx.Dtype
    format: KVFormat = PLAIN

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token as they are computed."""
        return self._bytes(PLAIN)

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values of one token in the cache of a running row."""
        return self._bytes(self.format)

    def _bytes(self, form: KVFormat) -> int:
        return sum(heads * form.bytes(size, self.dtype) for heads, size in (self.key_shape, self.value_shape))


class StateLeaf(Struct, frozen=True, kw_only=True):
    """A fixed-size state (convolution, state space): one array per entry; shapes exclude the batch."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]


Leaf = AttentionLeaf | StateLeaf


class CacheLayout:
    """The caches of one model, derived from a forward pass of one token that is never evaluated.

    A model with experts has one more, behind those of its layers: the routes of the tokens, as keys (1, C) of C choices
    (`Mixtures.routes`), with values of size 0. They stay with the keys and values that were computed along them.
    `probe_batching` sets: mask_axes, number of axes of attention masks; query_heads, number of query heads if it is the
    same in all layers and they take masks as given; shares_prompts, whether rows can share a prompt. Raises ModelError
    for caches that cannot hold several sequences.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mixtures = Mixtures(model)
        cache = self.fresh()
        self.compute(mx.zeros((1, 1), dtype=mx.int32), cache)
        self.mask_axes = 4
        self.query_heads: int | None = None
        self.shares_prompts = False
        self.leaves: tuple[Leaf, ...] = tuple(_leaf(c) for c in flatten(cache))
        self._nested = tuple(len(c.caches) if isinstance(c, CacheList) else 0 for c in cache)

    def fresh(self) -> list[Any]:
        """Return an empty cache of mlx-lm for prefill."""
        routes: list[Any] = [KVCache()] if self.mixtures else []  # type: ignore[no-untyped-call]
        return [*make_prompt_cache(self.model), *routes]

    def compute(self, token_B_T: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the logits of a pass, (B, T, V). Its tokens are appended to the caches, in the order of `nest`."""
        if not self.mixtures:
            logits_B_T_V: mx.array = self.model(token_B_T, cache=cache)
            return logits_B_T_V
        with self.mixtures.recorded() as chosen:
            logits_B_T_V = self.model(token_B_T, cache=cache[:-1])
        route_B_1_T_C = self.mixtures.routes(chosen)[:, None]
        cache[-1].update_and_fetch(route_B_1_T_C, route_B_1_T_C[..., :0])
        return logits_B_T_V

    @property
    def right_padding_limit(self) -> int | None:
        """Maximum length of prompts that may be padded on the right and prefilled together; None = any length.

        Causal attention ignores padding. A fixed-size state does not (0), and neither does a window that padding fills.
        """
        if any(isinstance(leaf, StateLeaf) for leaf in self.leaves):
            return 0
        windows = [leaf.window for leaf in self.leaves if isinstance(leaf, AttentionLeaf) and leaf.window is not None]
        return min(windows, default=None)

    def hold(self, form: KVFormat) -> None:
        """Hold keys and values of running rows in this format; routes stay as they are. Raises ModelError."""
        layers = len(self.leaves) - bool(self.mixtures)
        held = [replace(leaf, format=form) for leaf in self.leaves[:layers] if isinstance(leaf, AttentionLeaf)]
        form.check(held)
        rest = iter(held)
        self.leaves = tuple(
            next(rest) if i < layers and isinstance(leaf, AttentionLeaf) else leaf for i, leaf in enumerate(self.leaves)
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values of one token, in the largest layer that attends to all tokens."""
        whole = (leaf for leaf in self.leaves if isinstance(leaf, AttentionLeaf) and leaf.window is None)
        return max((leaf.held_bytes for leaf in whole), default=0)

    def saves_enough(self, tokens: int) -> bool:
        """Whether prompts are shared that save copies of so many tokens."""
        where = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
        return tokens * self.held_bytes >= MIN_SAVED_BYTES[where]

    def nest(self, flat: Sequence[Any]) -> list[Any]:
        """Arrange flat caches in the structure that the model's layers expect."""
        rest, hybrid = iter(flat), cast("Any", CacheList)
        return [hybrid(*(next(rest) for _ in range(n))) if n else next(rest) for n in self._nested]

    def prefilled(self, tokens: Sequence[int]) -> PromptState | None:
        """Return the evaluated state after `tokens`; None without tokens."""
        if not tokens:
            return None
        cache = self.fresh()
        with evaluation_mode(self.model):
            self.compute(mx.array([list(tokens)]), cache)
        state = self.extract(cache, 0, len(tokens))
        mx.eval(state)
        return state

    def extract(self, cache: Sequence[Any], row: int, tokens: int) -> PromptState:
        """Return the first `tokens` tokens of one row of a cache as lazy slices, without a copy."""
        return tuple(_extracted(c, row, tokens) for c in flatten(cache))

    def restore(self, state: PromptState, tokens: int) -> list[Any]:
        """Return an mlx-lm cache with a state of `tokens` tokens, for further prefill."""
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

    def trimmed(self, state: PromptState, tokens: int) -> PromptState:
        """Return the state after the first `tokens` tokens of a state; if it cannot be truncated, it has no more."""
        if self.right_padding_limit is not None:
            return state
        return tuple(tuple(a[:, :, :tokens] for a in arrays) for arrays in state)


def set_state(cache: ArraysCache, arrays: list[mx.array]) -> None:
    """Replace the arrays of a state. mlx-lm declares their type as None."""
    held: Any = cache
    held.cache = arrays


def get_state(cache: ArraysCache) -> list[mx.array]:
    """Return the arrays of a state. Raises ModelError if the model left one unset."""
    held: list[Any] = cache.cache
    if any(array is None for array in held):
        raise ModelError(
            "this model leaves part of its state unset after the first token, so rows cannot share a batch"
        )
    return held


def flatten(cache: Sequence[Any]) -> list[Any]:
    """Return the caches of all layers, with the members of each `CacheList` in its place."""
    return [leaf for c in cache for leaf in (c.caches if isinstance(c, CacheList) else (c,))]


def _leaf(cache: Any) -> Leaf:
    if isinstance(cache, ArraysCache):
        return StateLeaf(
            shapes=tuple(tuple(a.shape[1:]) for a in get_state(cache)), dtypes=tuple(a.dtype for a in get_state(cache))
        )
    if type(cache) not in (KVCache, RotatingKVCache) or (type(cache) is RotatingKVCache and cache.keep):
        raise ModelError(f"the cache of this model ({type(cache).__name__}) cannot hold several sequences")
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
        if cache.offset <= tokens:  # without right padding, which never fills the window
            kept = min(tokens, cache.max_size)
            return keys[row : row + 1, :, -kept:], values[row : row + 1, :, -kept:]
    return keys[row : row + 1, :, :tokens], values[row : row + 1, :, :tokens]


Logits = mx.array | NDArray[np.float32]
"""Logits in MLX or in NumPy."""


class RowCaches(Protocol):
    """KV caches of the slots of a batch, and the decode step that reads and writes them.

    `BatchKVCache` implements it in MLX; a backend can bring another implementation (`RowDecoder`).
    limit: number of tokens of all rows that buffers may have room for beyond what the rows need, if anything else can
    be done.
    """

    limit: int

    @property
    def tokens(self) -> int:
        """Number of tokens that the largest buffers hold, shared prompts included."""

    @property
    def arrays(self) -> Sequence[mx.array]:
        """Arrays that MLX has to evaluate with each step."""

    def has_room(self, prompts: Sequence[PrefilledPrompt]) -> bool:
        """Whether the prompts fit to the left of the current column."""

    def make_room(
        self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], prompts: Sequence[PrefilledPrompt]
    ) -> None:
        """Move columns so that the prompts fit to the left of the current one. Live rows have `positions_B` tokens."""

    def enter(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Store a prompt, for which there is room, in slots."""

    def state(self, slot: int, tokens: int) -> PromptState:
        """Return an evaluated copy of the KV cache of a row of `tokens` tokens, as prefill returns it."""

    def routes(self, slot: int, tokens: int) -> RouteArray | None:
        """Return a copy of the routes of a row of `tokens` tokens; None for a model without experts."""

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens, and free unused columns."""

    def ordered(self, slots: NDArray[np.int64], positions_B: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return slots with `positions_B` tokens in the order in which their steps compute least."""

    def waste(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_]) -> float:
        """Return the share of a step that free slots and the order of the live ones waste."""

    def grow(self, rows: int) -> None:
        """Append empty slots."""

    def clear(self, slot: int) -> None:
        """Zero one slot, so that NaN or inf do not spread to later rows."""

    def parts(
        self,
        token_B: mx.array | NDArray[np.int32],
        positions_B: NDArray[np.int32],
        due_B: NDArray[np.bool_],
        *,
        divided: bool,
    ) -> Generator[None, None, Logits]:
        """Append one token to every row, which has `positions_B` tokens; return the logits, (B, V), in a new array.

        Yields first when the adapters in use are known; then, if `divided`, after every block. Steps of other batches
        can be computed where it yields, and nothing of this batch changes until the end.
        due_B: rows whose logits are used.
        """


Computing = Callable[[Sequence[RowAdapter | None]], AbstractContextManager[None]]
"""Returns a context in which row b of a forward pass uses the adapter at index b; None for the policy."""


def pass_context(computing: Computing, adapter_B: Sequence[RowAdapter | None]) -> AbstractContextManager[None]:
    """Return the context of a forward pass; it is empty if all rows use the policy."""
    return nullcontext() if all(adapter is None for adapter in adapter_B) else computing(adapter_B)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch off dropout inside, and restore training mode afterwards if the model was in it."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
