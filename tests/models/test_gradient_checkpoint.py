"""Gradient checkpointing of blocks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ConcatenateKVCache

from clotho.models.attention import LayerKeys
from clotho.models.parameters import flat
from clotho.models.policy_model import checkpointed_blocks


class Block(nn.Module):
    """A block that leaves keys and values in its cache and returns them, as blocks with shared keys do.

    It takes those of another block as a pair, and returns a number too, as the blocks of Gemma 4 do.
    """

    calls = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = nn.Linear(4, 4, bias=False)

    def __call__(self, x: mx.array, mask: Any, cache: Any = None, shared: Any = None) -> Any:
        Block.calls += 1
        keys, values = cache.update_and_fetch(mx.tanh(self.inner(x)), mx.sin(self.inner(x)))
        x = x if shared is None else x + shared[0] * shared[1]
        return x + keys * mask, (keys, values), 2


class Blocks(nn.Module):
    """Two blocks. The result depends on their return values and on their caches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: list[nn.Module] = [Block(), Block()]

    def __call__(self, x: mx.array, caches: list[Any]) -> mx.array:
        total, shared = mx.zeros(()), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, shared, number = layer(x, mx.array(0.5), cache=cache, shared=shared)
            assert number == 2
            (keys, values), left = shared, cache.keys_and_values()
            total = total + mx.sum(keys * left[1]) + mx.sum(values * left[0] * left[0])
        return total + mx.sum(x * x)


def gradient(model: Blocks, caches: list[Any]) -> dict[str, np.ndarray]:
    """Return the gradient of the result with respect to each weight, of two passes with the same caches."""
    x = mx.arange(12, dtype=mx.float32).reshape(1, 1, 3, 4) / 10

    def twice(parameters: Any) -> mx.array:
        model.update(parameters)
        return model(x, caches) + model(x + 1.0, [keys.holding(keys.held) for keys in caches])

    def once(parameters: Any) -> mx.array:
        model.update(parameters)
        return model(x, caches)

    function = twice if isinstance(caches[0], LayerKeys) else once
    parameters = model.trainable_parameters()  # type: ignore[no-untyped-call]
    arrays = {name: np.array(array) for name, array in flat(mx.grad(function)(parameters)).items()}
    model.update(parameters)
    return arrays


@pytest.mark.parametrize("kind", [LayerKeys, ConcatenateKVCache])
def test_gradients_flow_through_cached_and_returned_keys(kind: Any) -> None:
    """Into a cache of Clotho or of mlx-lm, and of the same array on both paths: as without recomputation."""
    model = Blocks()
    plain = gradient(model, [kind(), kind()])
    with checkpointed_blocks(model.layers):
        saving = gradient(model, [kind(), kind()])
    for name, array in plain.items():
        np.testing.assert_allclose(saving[name], array, rtol=1e-5)
        assert np.abs(array).max() > 0.1


def test_blocks_are_recomputed_in_the_backward_pass() -> None:
    """Two blocks run twice. Their caches keep the keys of the forward pass."""
    model = Blocks()
    caches = [LayerKeys(), LayerKeys()]
    held: list[mx.array] = []

    def loss(parameters: Any) -> mx.array:
        model.update(parameters)
        result = model(mx.ones((1, 1, 3, 4)), caches)
        held.extend(array for keys in caches for array in keys.held)
        return result

    before = Block.calls
    with checkpointed_blocks(model.layers):
        mx.eval(mx.grad(loss)(model.trainable_parameters()))  # type: ignore[no-untyped-call]
    assert Block.calls - before == 4
    assert all(array is kept for array, kept in zip([a for keys in caches for a in keys.held], held, strict=True))


def test_the_class_of_a_block_is_restored_after_an_error() -> None:
    """It is another one inside the context only."""
    model = Blocks()
    with pytest.raises(ValueError, match="matmul"), checkpointed_blocks(model.layers):
        model(mx.ones((1, 1, 3, 5)), [LayerKeys(), LayerKeys()])
    assert type(model.layers[0]) is Block
