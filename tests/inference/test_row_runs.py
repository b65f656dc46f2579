"""Rows of different length are divided into runs, so that short rows do not compute the columns of long ones."""

from __future__ import annotations

import numpy as np
import pytest

from clotho.inference.row_runs import MIN_UNEVEN_COLUMNS, RowRun, even_runs, longest_first, wasted

LONG = 4 * MIN_UNEVEN_COLUMNS


def columns(*lengths: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The number of columns that each row attends to."""
    return np.array(lengths, dtype=np.int32)


def test_runs_have_every_row_once_and_the_columns_of_their_longest_row() -> None:
    """In the order of the rows, whatever their lengths."""
    random = np.random.default_rng(0)
    for rows in (1, 2, 33, 256):
        columns_B = random.integers(1, LONG, rows).astype(np.int32)
        runs = even_runs(columns_B, min_saved=64)
        assert [row for run in runs for row in range(run.rows.start, run.rows.stop)] == list(range(rows))
        assert [run.columns for run in runs] == [int(columns_B[run.rows].max()) for run in runs]


def test_a_long_row_between_short_ones_is_a_run_of_its_own() -> None:
    """The short rows before and after it are two runs."""
    columns_B = columns(*[9] * 10, LONG, *[7] * 10)
    assert even_runs(columns_B, min_saved=64) == [
        RowRun(slice(0, 10), 9),
        RowRun(slice(10, 11), LONG),
        RowRun(slice(11, 21), 7),
    ]


def test_a_run_that_saves_too_little_is_not_made() -> None:
    """A run costs a few calls more."""
    columns_B = columns(9, 9, LONG)
    saved = 2 * (LONG - 9)
    assert len(even_runs(columns_B, min_saved=saved)) == 2
    assert len(even_runs(columns_B, min_saved=saved + 1)) == 1


@pytest.mark.parametrize("longest", [1, MIN_UNEVEN_COLUMNS])
def test_short_rows_are_neither_divided_nor_ordered(longest: int) -> None:
    """Whatever the differences between them. Free slots are the only waste."""
    columns_B = columns(longest, *[1] * 1000)
    live_B = np.arange(1001) > 0
    assert even_runs(columns_B, min_saved=1) == [RowRun(slice(0, 1001), longest)]
    assert longest_first(np.arange(1001), columns_B).tolist() == list(range(1001))
    assert wasted(columns_B, live_B, min_saved=1) == pytest.approx(1 / 1001)


def test_long_rows_are_ordered_by_length() -> None:
    """Rows of the same length stay in their order, so that rows of one prompt stay neighbours."""
    assert longest_first(np.array([2, 4, 5, 8]), columns(3, LONG, 7, LONG)).tolist() == [4, 8, 5, 2]


def test_an_order_wastes_what_the_best_order_saves() -> None:
    """As a share of the scores, and half of that, because a copy of the KV cache takes longer than a step."""
    mixed_B, live_B = columns(*[LONG, 1] * 20), np.ones(40, dtype=np.bool_)
    best_B = mixed_B[longest_first(np.arange(40), mixed_B)]
    saved = 1.0 - (20 * LONG + 20) / (40 * LONG)
    assert wasted(mixed_B, live_B, min_saved=2 * LONG) == pytest.approx(saved / 2)
    assert wasted(best_B, live_B, min_saved=2 * LONG) == 0.0
