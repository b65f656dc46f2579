"""The gate of a feed-forward layer on the CPU backend."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from attachments.cpu.layers import original_swiglu, swiglu


def test_values_and_gradients_are_mlx_lms() -> None:
    """Within 4e-6 relative or 1e-6, as exact as the exponential is, for gates of any sign and size."""
    gate = mx.linspace(-80.0, 80.0, 4001)
    up, cotangent = mx.sin(gate), mx.cos(3 * gate)
    ours = mx.vjp(swiglu, [gate, up], [cotangent])
    theirs = mx.vjp(original_swiglu, [gate, up], [cotangent])
    for mine, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(other), rtol=4e-6, atol=1e-6)


def test_gates_far_from_zero_stay_finite() -> None:
    """Where e^-gate is more than float32 holds, the product is 0, and so are both gradients."""
    gate, up = mx.array([-100.0, -1e4]), mx.array([1.0, -2.0])
    (value,), gradients = mx.vjp(swiglu, [gate, up], [mx.ones(2)])
    assert np.array(mx.stack([value, *gradients])).tolist() == [[0.0, 0.0]] * 3


def test_narrow_types_are_left_to_mlx_lm() -> None:
    """In bfloat16 the result is mlx-lm's own, bit for bit."""
    gate, up = mx.linspace(-4, 4, 64).astype(mx.bfloat16), mx.linspace(2, -2, 64).astype(mx.bfloat16)
    assert bool(mx.array_equal(swiglu(gate, up), original_swiglu(gate, up)).item())
