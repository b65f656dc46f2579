"""MLX's random state goes into a checkpoint and comes back."""

from __future__ import annotations

import mlx.core as mx

from clotho.models.machine import random_state, restore_random_state


def test_a_restored_state_draws_the_same_numbers() -> None:
    """Dropout after a resume is the dropout of the uninterrupted run."""
    mx.random.seed(7)
    mx.eval(mx.random.uniform(shape=(5,)))
    state = random_state()
    expected = mx.random.uniform(shape=(5,)).tolist()
    mx.random.seed(99)
    restore_random_state(state)
    assert mx.random.uniform(shape=(5,)).tolist() == expected
    assert all(isinstance(word, int) for word in state)
