"""Helpers: tiny models that are decoded on the host, their prompts as they arrive, and the logits they must give.

`Rows` also serves the tests of the cache in MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from numpy.typing import NDArray

from attachments.cpu.blas import Floats
from attachments.cpu.decoder import HostDecoder
from attachments.cpu.kv_cache import HostKVCache
from clotho.inference.cache_layout import CacheLayout, RowCaches
from clotho.inference.rows import PrefilledPrompt, undivided
from tests.inference.engine_helpers import full_logits
from tests.small_models import ARCHITECTURES, FixedSource, tiny_source

PLAIN = ("qwen3", "qwen2", "llama")
"""Architectures that the host knows."""

RESERVED = 100
"""Number of tokens that a row can sample."""


def plain_source(architecture: str, **overrides: Any) -> FixedSource:
    """Build a tiny model of `PLAIN` whose norms and biases all differ, so that none can be left out unseen."""
    with patch.dict(ARCHITECTURES, {"qwen2": {}}):
        source = tiny_source(architecture, **overrides)
    leaves: Any = tree_flatten(source.model.parameters())
    vectors = [(name, array) for name, array in leaves if array.ndim == 1]
    keys = mx.random.split(mx.random.key(3), len(vectors))
    pairs = zip(vectors, keys, strict=True)
    source.model.update(
        tree_unflatten([(name, mx.random.uniform(0.5, 1.5, a.shape, key=key)) for (name, a), key in pairs])
    )
    mx.eval(source.model.parameters())
    return source


def adapt(model: nn.Module) -> None:
    """Put trained low-rank layers into every block: of two ranks, and beside layers that have none."""
    inner: Any = model["model"]
    for block in inner.layers:
        _adapt(block.self_attn, ("q_proj", "v_proj", "o_proj"), rank=2)
        _adapt(block.mlp, ("gate_proj", "down_proj"), rank=3)


def _adapt(parent: nn.Module, names: Sequence[str], rank: int) -> None:
    for i, name in enumerate(names):
        layer: Any = LoRALinear.from_base(parent[name], r=rank, scale=1.5)
        layer.lora_b = 0.3 * mx.random.normal(layer.lora_b.shape, key=mx.random.key(i))
        layer.eval()
        mx.eval(layer.parameters())
        parent[name] = layer


def arrival_of(layout: CacheLayout, tokens: Sequence[int], rows: int = 1) -> PrefilledPrompt:
    """Compute the prompt of so many rows whose next input is the last of `tokens`, as the engine does."""
    held = len(tokens) - 1
    if not held:
        return PrefilledPrompt(rows=rows, tokens=0, state=None, reserved=RESERVED)
    cache = layout.fresh()
    layout.model(mx.array([list(tokens[:-1])]), cache=cache)
    state = layout.extract(cache, 0, held)
    mx.eval(state)
    return PrefilledPrompt(rows=rows, tokens=held, state=state, reserved=held + RESERVED)


class Rows:
    """Rows of a cache, each with all of its tokens, the newest of which the cache has not seen yet."""

    def __init__(self, model: nn.Module, slots: int, cache: RowCaches | None = None) -> None:
        """cache: by default one on the host."""
        self.layout = CacheLayout(model)
        self.cache: Any = cache or HostKVCache(HostDecoder(model), slots)
        self.tokens: list[tuple[int, ...]] = [(0,)] * slots
        self.live_B = np.zeros(slots, dtype=np.bool_)

    @property
    def positions_B(self) -> NDArray[np.int32]:
        """Tokens that the cache holds of each row."""
        return np.array([len(tokens) - 1 for tokens in self.tokens], dtype=np.int32)

    def enter(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Let rows with one prompt join."""
        self.put(slots, tokens, arrival_of(self.layout, tokens, len(slots)))

    def put(self, slots: Sequence[int], tokens: Sequence[int], arrival: PrefilledPrompt) -> None:
        """Let rows join with what was computed of their prompt."""
        self.live_B[list(slots)] = False
        self.cache.make_room(self.positions_B, self.live_B, [arrival])
        self.cache.enter(slots, arrival)
        for slot in slots:
            self.tokens[slot], self.live_B[slot] = tuple(tokens), True

    def take(self, slots: Sequence[int]) -> None:
        """Keep only these."""
        self.tokens = [self.tokens[slot] for slot in slots]
        self.live_B = self.live_B[list(slots)]
        self.cache.take(slots, self.positions_B)

    def step(self) -> NDArray[np.float32]:
        """Compute the logits of every row, (B, V), and let each go on with another token."""
        newest_B = np.array([tokens[-1] for tokens in self.tokens], dtype=np.int32)
        logits_B_V = np.array(undivided(self.cache.parts(newest_B, self.positions_B, self.live_B, divided=False)))
        self.tokens = [(*tokens, (5 * tokens[-1] + slot + 1) % 256) for slot, tokens in enumerate(self.tokens)]
        return logits_B_V

    def check_step(self, but: Sequence[int] = ()) -> None:
        """Step, and compare every live row (`but` a few) with one full forward pass of its own."""
        tokens = list(self.tokens)
        found_B_V = self.step()
        for slot in set(np.flatnonzero(self.live_B).tolist()).difference(but):
            expected_V = full_logits(self.layout.model, tokens[slot])[-1]
            np.testing.assert_allclose(found_B_V[slot], expected_V, atol=1e-4)


def scaled_parts(factor: np.float32) -> Callable[..., Generator[None, None, Floats]]:
    """Return `HostDecoder.parts` with other logits: `factor` times as large."""
    true = HostDecoder.parts

    def parts(*given: Any) -> Generator[None, None, Floats]:
        logits_B_V = yield from true(*given)
        return logits_B_V * factor

    return parts
