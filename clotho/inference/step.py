"""A step in flight, and what is read from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clotho.inference.filters import PADDING
from clotho.inference.sampling import Drawn, Supports


@dataclass(eq=False, slots=True)
class Reading:
    """Tokens read from a finished step, for N rows that still live. top_*: (N, n) where some row asked for them.

    supports: tokens that could have been drawn, as `Completion.supports` has them, by index in N of the rows that
    record them.
    """

    slot_N: NDArray[np.int64]
    token_N: NDArray[np.int32]
    logp_N: NDArray[np.float32]
    version: int
    supports: dict[int, bytes]
    top_token_N: NDArray[np.uint32] | None = None
    top_logp_N: NDArray[np.float32] | None = None


@dataclass(eq=False, slots=True)
class Step:
    """A step in flight, for N rows. version: of the weights that computed it; known: its tokens need no waiting for.

    at_N: their places in the arrays; slot_N: where they are now, -1 if gone; serial_N: which rows they were.
    """

    drawn: Drawn
    at_N: NDArray[np.int64]
    slot_N: NDArray[np.int64]
    serial_N: NDArray[np.int64]
    version: int
    known: bool

    def read(self, serial_B: NDArray[np.int64]) -> Reading | None:
        """Wait for the step; return the tokens of rows that are still in their slots, None if no row is."""
        drawn = self.drawn
        token_B, logp_B = np.array(drawn.token_B), np.array(drawn.logp_B)
        stays_N = (self.slot_N >= 0) & (serial_B[self.slot_N] == self.serial_N)
        if not stays_N.any():
            return None
        at_N = self.at_N[stays_N]
        supports = _supports(drawn.supports, at_N) if drawn.supports is not None else {}
        reading = Reading(self.slot_N[stays_N], token_B[at_N], logp_B[at_N], self.version, supports)
        if drawn.top_token_B_N is not None and drawn.top_logp_B_N is not None:
            reading.top_token_N = np.array(drawn.top_token_B_N)[at_N]
            reading.top_logp_N = np.array(drawn.top_logp_B_N)[at_N]
        return reading


def _supports(supports: Supports, at_N: NDArray[np.int64]) -> dict[int, bytes]:
    """Cut each row's tokens before the padding; rows that are not at any of the places `at_N` have left."""
    token_R_K = np.array(supports.token_R_K).astype("<u4", copy=False)
    count_R = np.count_nonzero(token_R_K != PADDING, axis=-1).tolist()
    index = {place: n for n, place in enumerate(at_N.tolist())}
    recorded = enumerate(np.array(supports.row_R).tolist())
    return {index[place]: token_R_K[r, : count_R[r]].tobytes() for r, place in recorded if place in index}
