"""Attention of whole sequences on the CPU backend."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from attachments.cpu.layers import attend

B, HEADS, KEY_HEADS, Q, S, SIZE = 3, 4, 2, 5, 7, 8


def arrays() -> list[mx.array]:
    """Queries, keys and values."""
    keys = mx.random.split(mx.random.key(0), 3)
    shapes = ((B, HEADS, Q, SIZE), (B, KEY_HEADS, S, SIZE), (B, KEY_HEADS, S, SIZE))
    return [mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)]


def some_keys() -> mx.array:
    """Every query sees its own key and some others."""
    return (mx.random.uniform(shape=(B, 1, Q, S), key=mx.random.key(1)) > 0.5) | (mx.arange(S) == 2)


@pytest.mark.parametrize("mask", [None, "causal", some_keys(), some_keys()[0, 0]])
def test_values_and_gradients_are_mlxs(mask: mx.array | str | None) -> None:
    """With heads that share keys, for every kind of mask that mlx-lm's models make."""

    def ours(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        attended = attend(q, k, v, scale=0.3, mask=mask)
        assert attended is not None
        return attended

    def theirs(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)

    cotangent = mx.random.normal((B, HEADS, Q, SIZE), key=mx.random.key(2))
    (mine,), my_gradients = mx.vjp(ours, arrays(), [cotangent])
    (other,), gradients = mx.vjp(theirs, arrays(), [cotangent])
    for one, two in zip([mine, *my_gradients], [other, *gradients], strict=True):
        np.testing.assert_allclose(np.array(one), np.array(two), atol=2e-6)


def test_scores_of_any_size_stay_finite() -> None:
    """Also where the key with the largest score by far is one that the query does not see."""
    q, k, v = arrays()
    k[:, :, 3] *= 1e4
    mask = mx.broadcast_to(mx.arange(S) != 3, (B, 1, Q, S))
    attended = attend(q, k, v, scale=1.0, mask=mask)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask)
    assert attended is not None
    np.testing.assert_allclose(np.array(attended), np.array(expected), atol=2e-6)


def test_what_it_does_not_know_is_left_to_others() -> None:
    """Narrow types, masks of numbers, and masks of other axes."""
    q, k, v = arrays()
    narrow = [array.astype(mx.bfloat16) for array in (q, k, v)]
    assert attend(narrow[0], narrow[1], narrow[2], scale=1.0, mask=None) is None
    assert attend(q, k, v, scale=1.0, mask=mx.zeros((Q, S))) is None
    assert attend(q, k, v, scale=1.0, mask=mx.ones((B, 1, 1, Q, S), dtype=mx.bool_)) is None
