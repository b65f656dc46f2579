"""Rotations on the CPU are mlx's, with sines computed once for all layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from attachments.cpu.layers import CachedRoPE, is_replaceable_rope


def _pair(dims: int = 8) -> tuple[Any, Any]:
    plain, ours = nn.RoPE(dims, base=1e6, scale=0.5), nn.RoPE(dims, base=1e6, scale=0.5)
    ours.__class__ = CachedRoPE
    return plain, ours


@pytest.mark.parametrize("offset", [0, 17, [3, 0, 250]])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rotated_numbers_equal_those_of_mlx(offset: int | list[int], tokens: int) -> None:
    """From one position for all rows, or from one for each."""
    plain, ours = _pair()
    x = mx.random.normal((3, 2, tokens, 8), key=mx.random.key(0))
    start = mx.array(offset) if isinstance(offset, list) else offset
    np.testing.assert_allclose(np.array(ours(x, offset=start)), np.array(plain(x, offset=start)), atol=1e-6)


def test_gradients_equal_those_of_mlx() -> None:
    """The way back is the rotation the other way round."""
    plain, ours = _pair()
    x, g = (mx.random.normal((1, 2, 4, 8), key=mx.random.key(n)) for n in (0, 1))
    found, wanted = (mx.grad(lambda x, layer=layer: mx.sum(layer(x, offset=9) * g))(x) for layer in (ours, plain))
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-6)


def test_sines_follow_the_positions() -> None:
    """A layer at other positions, or for more tokens, does not reuse what another one left."""
    plain, ours = _pair()
    x = mx.random.normal((2, 1, 3, 8), key=mx.random.key(0))
    for offset in (mx.array([1, 2]), mx.array([5, 6]), 4, 0):
        for tokens in (3, 1):
            part = x[:, :, :tokens]
            np.testing.assert_allclose(
                np.array(ours(part, offset=offset)), np.array(plain(part, offset=offset)), atol=1e-6
            )


def test_other_kinds_are_left_to_mlx() -> None:
    """Rotations of neighbours are not taken; parts of heads and half precision go mlx's way."""
    assert not is_replaceable_rope(nn.RoPE(8, traditional=True))
    assert is_replaceable_rope(nn.RoPE(8))
    plain, ours = _pair()
    for x in (mx.ones((1, 1, 2, 12)), mx.ones((1, 1, 2, 8), dtype=mx.float16)):
        np.testing.assert_array_equal(np.array(ours(x, offset=3)), np.array(plain(x, offset=3)))
