"""Muon (K. Jordan 2024, kellerjordan.github.io/posts/muon): momentum, orthogonalised, for the matrices of a network.

Variant: the update is scaled by 0.2 sqrt(max(rows, columns)), arXiv:2502.16982, equation 4, so that its root mean
square is about 0.2 for every shape, much as AdamW's. It treats both orientations alike (an adapter's A and B are stored
one transposed to the other), and one learning rate serves the matrices and the arrays that AdamW takes.
"""

from __future__ import annotations

import math
import re

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.training.optimizers import adamw
from clotho.training.optimizers.rule import Arrays

ITERATIONS = 5
"""Of Newton-Schulz; after them the singular values lie between about 0.7 and 1.2, not nearer to 1."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x -> a x + b x^3 + c x^5, chosen for the steepest slope at zero."""

EPSILON = 1e-7
"""Added to the norm that a matrix is divided by."""

UPDATE_SIZE = 0.2
"""Root mean square of an update, before the rate."""

NO_HIDDEN_MATRIX = re.compile(r"embed|wte|wpe|lm_head|bias$")


def takes(name: str, parameter: mx.array) -> bool:
    """Whether a parameter is a hidden matrix, or a stack of them such as experts; AdamW takes all others.

    Those are vectors (matrices of one row or column among them), biases, and, as the author advises, embeddings and
    the head, which are known by their names.
    """
    return parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1 and not NO_HIDDEN_MATRIX.search(name)


def slots(parameter: mx.array) -> Arrays:
    """Decaying sum of the gradients; zero."""
    return {"momentum": mx.zeros(parameter.shape, dtype=mx.float32)}


def constants(t: int, settings: LearnerSection) -> dict[str, float]:
    """Those of AdamW, for what it takes."""
    return adamw.constants(t, settings)


def rule(
    theta: mx.array, gradient: mx.array, slots: Arrays, constants: Arrays, rate: mx.array, settings: LearnerSection
) -> tuple[mx.array, Arrays]:
    """M <- momentum M + G;  theta <- theta - rate 0.2 sqrt(max(rows, columns)) orthogonalized(G + momentum M)."""
    momentum = settings.momentum * slots["momentum"] + gradient
    update = orthogonalized(gradient + settings.momentum * momentum)  # Nesterov's
    scale = UPDATE_SIZE * math.sqrt(max(theta.shape[-2:]))
    return theta - (rate * scale) * update, {"momentum": momentum}


def orthogonalized(matrices: mx.array) -> mx.array:
    """Each (rows, columns) matrix of the last two axes with its singular values near 1: U V^T of U S V^T, roughly.

    Zero stays zero. Singular values below about 1/500 of the norm do not get all the way up.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = mx.swapaxes(matrices, -1, -2) if tall else matrices
    x = x / (mx.sqrt(mx.sum(mx.square(x), axis=(-2, -1), keepdims=True)) + EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ mx.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return mx.swapaxes(x, -1, -2) if tall else x
