"""A step whose graph is built before its input is known.

Building the graph of a small model takes the host a good part of the time that computing it takes. All that a step
reads of the step before is the tokens drawn; so its graph can be built, while that one is being computed, over an array
whose values are written into place last.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np


class StepAhead:
    """Logits of the next step, not yet computed. undo: puts the caches back to what they were before it was built."""

    def __init__(self, rows: int, build: Callable[[mx.array], mx.array], undo: Callable[[], None]) -> None:
        self._input_B = mx.zeros((rows,), mx.int32)
        mx.eval(self._input_B)
        self._undo = undo
        self._logits_B_V = build(self._input_B)

    def given(self, token_B: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens into place; return them and the logits. To be forgotten then, before they are computed.

        What could be taken back holds old buffers, and what is held elsewhere is copied instead of written in place.
        """
        np.array(self._input_B, copy=False)[:] = np.array(token_B)
        return self._input_B, self._logits_B_V

    def take_back(self) -> None:
        """Undo what building changed."""
        self._undo()
