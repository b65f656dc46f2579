"""MLX's random state as plain integers. It belongs to a thread: use this in the compute thread."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import numpy as np


def _arrays() -> list[mx.array]:
    return cast("list[mx.array]", mx.random.state)


def random_state() -> tuple[int, ...]:
    """The calling thread's random state, as 32-bit integers."""
    return tuple(int(word) for array in _arrays() for word in np.array(array).reshape(-1))


def restore_random_state(words: tuple[int, ...]) -> None:
    """Continue the calling thread's random numbers from a state that `random_state` gave."""
    position = 0
    arrays = _arrays()
    for index, array in enumerate(arrays):
        part = words[position : position + array.size]
        arrays[index] = mx.array(part, dtype=mx.uint32).reshape(array.shape)
        position += array.size
