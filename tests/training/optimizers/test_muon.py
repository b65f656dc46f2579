"""Muon against float64, MLX's own, and by hand."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from clotho.training.optimizers.muon import orthogonalized, takes
from tests.training.optimizers.walks import SHAPES, assert_close, one_step, oracle, settings, walk, walk_of

MUON = settings("muon", momentum=0.7, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6)


def polynomial(matrix: Any) -> Any:
    """What five iterations make of each singular value of matrix / norm, by way of its decomposition."""
    u, s, v = np.linalg.svd(matrix / (np.linalg.norm(matrix) + 1e-7), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def test_several_steps_equal_a_numpy_reference() -> None:
    """Momentum, Nesterov's look ahead, orthogonalised by singular values, scaled by 0.2 sqrt(max(rows, columns))."""
    momentum: dict[str, Any] = {}

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        momentum[name] = 0.7 * momentum.get(name, 0.0) + g
        direction = g + 0.7 * momentum[name]
        stack = direction.reshape(-1, *direction.shape[-2:])
        update = np.stack([polynomial(matrix) for matrix in stack]).reshape(direction.shape)
        return theta - rate * (0.2 * math.sqrt(max(theta.shape[-2:])) * update + 0.1 * theta)

    matrices = [name for name, shape in SHAPES.items() if len(shape) > 1]
    expected = oracle(lambda name, *given: move(name, *given) if name in matrices else given[0], 6)
    updated, state = walk(MUON, 6)
    assert_close(updated, {name: expected[name] for name in matrices}, rtol=3e-5)
    assert_close(state.slots["momentum"], momentum)


def test_a_vector_moves_as_adamw_moves_it() -> None:
    """With the betas, the epsilon and the decay of the same settings."""
    adamw, _ = walk(settings("adamw", weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6), 4)
    assert_close(walk(MUON, 4)[0], {"vector": adamw["vector"]}, rtol=0)


@pytest.mark.parametrize("name", ["wide", "tall"])
def test_several_steps_equal_mlx_but_for_the_scale(name: str) -> None:
    """Its scale is sqrt(max(1, rows / columns)), of one orientation; its decay L2; experts it takes for one matrix."""
    rows, columns = SHAPES[name]
    theirs = walk_of(optim.Muon(0.0, momentum=0.7, weight_decay=0.0), 1, names=(name,))[name]
    ours = walk(settings("muon", momentum=0.7), 1)[0][name]
    start = walk(MUON, 0)[0][name]
    ratio = 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1.0, rows / columns))
    np.testing.assert_allclose(np.array(ours - start), np.array(ratio * (theirs - start)), rtol=1e-4, atol=1e-7)


def test_the_first_step_of_a_diagonal_by_hand() -> None:
    """diag(3, 4) / 5 = diag(0.6, 0.8), as five times the quintic takes it; and what is zero stays zero.

    0.6 goes to 1.1933, 0.9119, 0.8011, 0.9747, 0.7229, and 0.8 to 0.9765, 0.7211, 1.0895, 0.6960, 1.1192. The step is
    -0.1 x 0.2 sqrt 2 times that.
    """
    moved = np.array(one_step("muon", [[0.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [0.0, 4.0]]))
    np.testing.assert_allclose(moved, -0.02 * math.sqrt(2) * np.diag([0.7229, 1.1192]), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (3, 8, 40)])
def test_singular_values_come_out_near_one(shape: tuple[int, ...]) -> None:
    """Whatever they were: between 0.6 and 1.3 for a condition of 100; so the root mean square is 1 / sqrt(40)."""
    rng = np.random.default_rng(0)
    u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    matrix = (u * np.geomspace(1.0, 0.01, 8)) @ v
    made = np.array(orthogonalized(mx.array(matrix, dtype=mx.float32)))
    values = np.linalg.svd(made, compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert np.sqrt((made**2).mean()) == pytest.approx(1 / math.sqrt(40), rel=0.2)


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        ("layers.0.self_attn.q_proj.lora_a", (64, 8), True),
        ("layers.0.mlp.switch_mlp.up_proj.weight", (4, 64, 32), True),
        ("layers.0.norm.weight", (64,), False),
        ("layers.0.conv1d.weight", (64, 4, 1), False),
        ("layers.0.mlp.switch_mlp.up_proj.bias", (4, 64), False),
        ("model.embed_tokens.weight", (256, 64), False),
        ("transformer.wte.weight", (256, 64), False),
        ("lm_head.weight", (256, 64), False),
    ],
)
def test_hidden_matrices_are_taken_and_nothing_else(name: str, shape: tuple[int, ...], taken: bool) -> None:
    """By shape, and by the names of embeddings and head."""
    assert takes(name, mx.zeros(shape)) is taken
