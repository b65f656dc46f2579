"""MLX's random state as plain integers. It belongs to a thread: use this in the compute thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import mlx.core as mx
import numpy as np


def random_state() -> tuple[int, ...]:
    """The calling thread's random state: the two 32-bit halves of its key, the upper first."""
    arrays = cast("Iterable[mx.array]", mx.random.state)
    return tuple(int(word) for array in arrays for word in np.array(array).reshape(-1))


def restore_random_state(words: tuple[int, ...]) -> None:
    """Continue the calling thread's random numbers from a state that `random_state` gave.

    A key is the seed it came from, split into halves (`mx.random.key`), so seeding with a key's own value restores it;
    the state itself cannot be assigned to in every version of MLX.
    """
    upper, lower = words
    mx.random.seed(upper << 32 | lower)
