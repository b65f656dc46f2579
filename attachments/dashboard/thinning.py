"""Numbers in columns, with a limit on the number of rows: beyond it, old neighbours are merged.

A long run is thus shown from its beginning, in equal detail except for its newest part, which is shown in full.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 2000
"""Number of rows of a table; a chart has fewer pixels."""

MAX_COLUMNS = 1000

NEWEST_SHARE = 4
"""One row of this number, the newest ones, is not merged."""

DIGITS = 5
"""Significant digits of a number that is not whole, so that a response is small. The axes have all digits."""

LINES = "lines"
"""Column with the number of lines that each row stands for; without a merged row, it is missing."""

NAN = float("nan")
"""A missing number in a column."""

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]


class ThinnedTable:
    """Rows of numbers in columns. A row stands for one line of a file, or for several neighbours that were merged.

    A number of a merged row is the mean of its lines, in columns of `latest` that of its last line, and in columns of
    `sums` their sum; missing numbers do not count. Of a mean, the least and the largest number are kept too.

    ends: number of lines up to the end of each row. offsets: where the first line of each row begins in its file.
    """

    def __init__(self, *, max_rows: int = MAX_ROWS, latest: Collection[str] = (), sums: Collection[str] = ()) -> None:
        self._max_rows, self._latest, self._sums = max_rows, latest, sums
        self.ends, self.offsets = array("q"), array("q")
        self._columns: dict[str, array[float]] = {}
        self._texts = dict[str, list[str]]()
        self._merged = 0
        self._minima, self._maxima = dict[str, Numbers](), dict[str, Numbers]()

    @property
    def names(self) -> Collection[str]:
        """The names of the columns of numbers."""
        return self._columns.keys()

    def append(self, numbers: Mapping[str, float | None], texts: Mapping[str, str], offset: int) -> None:
        """Append the row of a line. texts: of the columns of texts, which every row has."""
        rows = len(self.ends)
        for name in numbers.keys() - self._columns.keys():
            if len(self._columns) < MAX_COLUMNS:
                self._columns[name] = array("d", [NAN]) * rows
        for name, column in self._columns.items():
            value = numbers.get(name)
            column.append(NAN if value is None else value)
        for name, text in texts.items():
            self._texts.setdefault(name, []).append(text)
        self.ends.append(self.ends[-1] + 1 if rows else 1)
        self.offsets.append(offset)
        if rows + 1 > self._max_rows:
            self._merge()

    def newest(self, name: str, count: int) -> list[float | None]:
        """Return the newest numbers of a column; empty if there is none."""
        return _listed(np.array(self._columns.get(name, ())[-count:]))

    def rows_between(self, name: str, low: float, high: float) -> range:
        """Return the rows that have the lines with a number from `low` to `high` in an ascending column."""
        column = self._columns.get(name, array("d"))
        return range(bisect_left(column, low), min(bisect_left(column, high) + 1, len(column)))

    def part(self, start: int, end: int) -> dict[str, Any]:
        """Return the rows that end with a line from `start` (excluded) to `end`, as in a response of the API."""
        first, stop = bisect_right(self.ends, start), bisect_right(self.ends, end)
        columns = {name: np.array(column[first:stop]) for name, column in self._columns.items()}
        is_whole = first == 0 and stop == len(self.ends)
        found: dict[str, Any] = {
            name: _listed(column if name in self._latest else _rounded(column))
            for name, column in columns.items()
            if is_whole or not np.isnan(column).all()
        }
        found |= {name: texts[first:stop] for name, texts in self._texts.items()}
        lines = np.diff(self.ends, prepend=0)[first:stop]
        if lines.max(initial=1) > 1:
            found[LINES] = lines.tolist()
        minima, maxima = dict[str, list[float | None]](), dict[str, list[float | None]]()
        unmerged: list[float | None] = [None] * (stop - max(first, self._merged))
        for name in self._minima:
            low, high = self._minima[name][first:stop], self._maxima[name][first:stop]
            if not np.array_equal(low, high, equal_nan=True):
                minima[name], maxima[name] = (_listed(_rounded(ends)) + unmerged for ends in (low, high))
        return {"columns": found, "minima": minima, "maxima": maxima}

    def _merge(self) -> None:
        """Merge the rows of equally long blocks of lines, except the newest rows.

        Blocks are as short as leaves room for new rows. Their length is a power of 2, so that earlier blocks fit in.
        The last block can get more lines later.
        """
        rows = len(self.ends)
        ends = np.array(self.ends[: rows - rows // NEWEST_SHARE])
        until, length = len(ends), 1
        while ends[-1] > length * self._max_rows // 2:
            length *= 2
        starts = np.flatnonzero(np.diff((ends - 1) // length, prepend=-1))
        lines = np.diff(ends, prepend=0)
        for name, column in self._columns.items():
            merged = self._merged_column(name, np.array(column[:until]), lines, starts)
            self._columns[name] = array("d", merged.tobytes()) + column[until:]
        last_rows = [*(starts[1:] - 1).tolist(), until - 1]
        for texts in self._texts.values():
            texts[:until] = [texts[row] for row in last_rows]
        self.ends = array("q", ends[last_rows].tobytes()) + self.ends[until:]
        self.offsets = array("q", (self.offsets[row] for row in starts.tolist())) + self.offsets[until:]
        self._merged = len(starts)

    def _merged_column(self, name: str, numbers: Numbers, lines: Counts, starts: Counts) -> Numbers:
        """Return the numbers of merged rows, and keep the extremes of means.

        lines: number of lines of each row. starts: first row of each merged one.
        """
        if name in self._latest:
            return numbers[[*(starts[1:] - 1), -1]]
        is_known = ~np.isnan(numbers)
        weights = is_known * (1 if name in self._sums else lines)
        sums = np.add.reduceat(np.where(is_known, numbers, 0.0) * weights, starts)
        known = np.add.reduceat(weights, starts)
        with np.errstate(all="ignore"):
            if name in self._sums:
                return np.where(known, sums, np.nan)
            for extremes, choose in ((self._minima, np.fmin), (self._maxima, np.fmax)):
                earlier = np.full(len(numbers), np.nan)
                earlier[: self._merged] = extremes.get(name, np.nan)
                extremes[name] = choose.reduceat(np.where(np.isnan(earlier), numbers, earlier), starts)
            return sums / known


def _rounded(numbers: Numbers) -> Numbers:
    """Return numbers with `DIGITS` significant digits; whole ones keep all, because they are counts."""
    with np.errstate(all="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.abs(numbers))))
        rounded = np.round(numbers * scale) / scale
    return np.where(np.isfinite(rounded) & (numbers != np.floor(numbers)), rounded, numbers)


def _listed(numbers: Numbers) -> list[float | None]:
    """Return numbers as JSON writes them: None for NaN, and integers if all are whole."""
    is_missing = np.isnan(numbers)
    is_whole = bool((is_missing | ((numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53))).all())
    values = np.where(is_missing, 0.0, numbers).astype(np.int64 if is_whole else np.float64).tolist()
    if is_missing.any():
        return [None if missing else value for value, missing in zip(values, is_missing.tolist(), strict=True)]
    return values  # type: ignore[no-any-return]
