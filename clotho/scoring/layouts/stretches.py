"""Completions of like lengths go through the blocks together, the others in passes of their own: less padding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.scoring.layouts.lengths import bucket

PASS = 256
"""Positions that a further pass over the blocks must save: it has a price of its own, on a GPU as on the CPU."""


class Stretch(NamedTuple):
    """Rows, ascending, that go through the blocks in one pass, and how many columns of each."""

    rows: NDArray[np.intp]
    columns: int

    @property
    def positions(self) -> int:
        """What the blocks compute, padding included."""
        return len(self.rows) * self.columns


def stretches(length_B: NDArray[np.int32]) -> list[Stretch]:
    """Cut rows, by length, where that leaves the fewest positions to compute, `PASS` for each pass counted in."""
    width_B = np.array([bucket(int(length)) for length in length_B], dtype=np.int64)
    widths = sorted(set(width_B.tolist()))
    counts = [int((width_B == width).sum()) for width in widths]
    costs, starts = (
        [0],
        list[int](),
    )  # of the rows of the first so many widths: the least, and where its last pass began
    for end, width in enumerate(widths, 1):
        options = [costs[start] + sum(counts[start:end]) * width + PASS for start in range(end)]
        starts.append(options.index(min(options)))
        costs.append(min(options))
    cut: list[Stretch] = []
    end = len(widths)
    while end:
        start = starts[end - 1]
        cut.append(Stretch(np.flatnonzero(np.isin(width_B, widths[start:end])), widths[end - 1]))
        end = start
    return cut
