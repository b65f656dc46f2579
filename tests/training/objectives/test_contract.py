"""Sums and means over the trained tokens of completions."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tests.training.objectives.objective_inputs import float_array, tokens

TOKENS = tokens([0.0] * 5, loss_mask_N=[1, 1, 0, 1, 0], sequence_N=[0, 0, 0, 2, 1])
VALUE_N = float_array([1.0, 2.0, 50.0, 4.0, 70.0])


def test_sums_and_means_use_only_trained_tokens() -> None:
    """Completion 0: 1 + 2, the 50 is not trained on.

    Completion 1 has no trained token: 0. Completion 2: 4. Means 1.5, 0, 4.
    """
    assert np.array(TOKENS.sum_B(VALUE_N)).tolist() == [3.0, 0.0, 4.0]
    assert np.array(TOKENS.mean_B(VALUE_N)).tolist() == [1.5, 0.0, 4.0]


def test_values_of_completions_are_expanded_to_their_tokens() -> None:
    """Completions of values 5, 6, 7."""
    assert np.array(TOKENS.spread_N(float_array([5.0, 6.0, 7.0]))).tolist() == [5.0, 5.0, 5.0, 7.0, 6.0]


def test_the_gradient_of_a_mean_reaches_its_trained_tokens() -> None:
    """d(10 mean_0 + 20 mean_2): 10/2 for both tokens of completion 0, 20/1 for that of completion 2, else 0."""
    gradient_N = mx.grad(lambda value_N: mx.sum(float_array([10.0, 0.0, 20.0]) * TOKENS.mean_B(value_N)))(VALUE_N)
    assert np.array(gradient_N).tolist() == [5.0, 5.0, 0.0, 20.0, 0.0]
