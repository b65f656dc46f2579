"""Rows of different length in one decode step: runs of neighbouring rows, and the order in which runs save most.

Rows are right-aligned, and attention is computed over as many columns as the longest row has. A batch with one long row
therefore computes its columns for every row. If the rows are divided into runs, each run computes the columns of its
own longest row. A run costs a few more calls (kernels on a GPU), so only runs that save enough are made. The KV
caches of the host and of MLX both use this module.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

MIN_UNEVEN_COLUMNS = 128
"""Rows are divided only if the longest attends to more columns."""

COPIED = 2
"""A copy of the KV cache in another order takes about as long as so many steps over it: it reads and writes."""

MIN_RUN_BYTES = {"cpu": 2**17, "gpu": 2**21}
"""Minimum number of bytes of keys and values per layer that another run of rows must save, because it needs more
kernels. The value for a GPU is computed: three kernels of 2 microseconds take as long as reading 2 MiB on an M4 Max.
"""

Columns = NDArray[np.int32]


class RowRun(NamedTuple):
    """Neighbouring rows that attend to the newest `columns` columns."""

    rows: slice
    columns: int


def even_runs(columns_B: Columns, min_saved: int) -> list[RowRun]:
    """Divide rows that attend to `columns_B` columns; another run saves at least `min_saved` rows x columns."""
    found: list[RowRun] = []
    parts = [slice(0, len(columns_B))]
    while parts:
        part = parts.pop()
        columns_N = columns_B[part]
        longest, rows = int(columns_N.max()), len(columns_N)
        if longest > MIN_UNEVEN_COLUMNS and rows > 1:
            before_N, after_N = np.maximum.accumulate(columns_N), np.maximum.accumulate(columns_N[::-1])[::-1]
            first_N = np.arange(1, rows)
            saved_N = first_N * (longest - before_N[:-1]) + (rows - first_N) * (longest - after_N[1:])
            best = int(saved_N.argmax())
            if saved_N[best] >= min_saved:
                middle = part.start + best + 1
                parts += [slice(middle, part.stop), slice(part.start, middle)]
                continue
        found.append(RowRun(part, longest))
    return found


def min_saved_scores(token_bytes: int) -> int:
    """Return `min_saved` for MLX. token_bytes: of the keys and values of one token in a layer."""
    where = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    return max(1, MIN_RUN_BYTES[where] // max(1, token_bytes))


def longest_first(slots: NDArray[np.int64], columns_N: Columns) -> NDArray[np.int64]:
    """Return slots that attend to `columns_N` columns by length; as they are if no row is long."""
    is_long = columns_N.max(initial=0) > MIN_UNEVEN_COLUMNS
    return slots[np.argsort(-columns_N, kind="stable")] if is_long else slots


def wasted(columns_B: Columns, live_B: NDArray[np.bool_], min_saved: int) -> float:
    """Return the share of a step that free slots waste, or of a copy of the KV cache that the order of rows wastes."""
    free = 1.0 - np.count_nonzero(live_B) / len(live_B)
    if columns_B.max() <= MIN_UNEVEN_COLUMNS:
        return free
    best = _scores(np.sort(columns_B[live_B])[::-1], min_saved)
    return max(free, (1.0 - best / _scores(columns_B, min_saved)) / COPIED)


def _scores(columns_B: Columns, min_saved: int) -> int:
    """Return how many scores the runs of rows compute."""
    return sum((run.rows.stop - run.rows.start) * run.columns for run in even_runs(columns_B, min_saved))
