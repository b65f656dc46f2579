"""What the batch asks of the caches of its rows, wherever they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.inference.cache_layout import PromptState

Numbers = mx.array | NDArray[np.float32]
"""Logits, on the device or on the host."""


class Arrival(NamedTuple):
    """A computed prompt of `tokens` tokens for so many rows to come. state: None before the first token."""

    rows: int
    tokens: int
    state: PromptState | None


class RowCaches(Protocol):
    """Caches of numbered slots, and the step that reads and writes all of them."""

    @property
    def tokens(self) -> int:
        """Tokens that the largest buffers have room for, prompts that rows share included."""
        ...

    @property
    def arrays(self) -> Sequence[mx.array]:
        """What MLX has to compute with each step."""
        ...

    def has_room(self, arrivals: Sequence[Arrival]) -> bool:
        """Say whether prompts fit before the current column as it is."""
        ...

    def make_room(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], arrivals: Sequence[Arrival]) -> None:
        """See to it that prompts fit before the current column, beside live rows of `positions_B` tokens."""
        ...

    def enter(self, slots: Sequence[int], arrival: Arrival) -> None:
        """Put a computed prompt into slots, for which there is room."""
        ...

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens; give back columns that none needs."""
        ...

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        ...

    def clear(self, slot: int) -> None:
        """Zero one slot: what is not finite must not reach later rows."""
        ...

    def logits(
        self, token_B: mx.array | NDArray[np.int32], positions_B: NDArray[np.int32], due_B: NDArray[np.bool_]
    ) -> Numbers:
        """Compute a step in which every row adds one token after the `positions_B` it has; (B, V), the caller's.

        Rows that are not due are computed in vain.
        """
        ...
