"""A set of integers that is small if most of them are neighbours: the steps and groups of a history."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, starmap

MAX_RANGES = 5
"""Number of ranges that the text of a set lists."""


class IntegerSet:
    """A set of integers, stored as ranges. As text, it is at most `MAX_RANGES` ranges: `1, 3-7 and 12 more`."""

    def __init__(self, numbers: Iterable[int] = (), *, ranges: Iterable[range] = ()) -> None:
        """ranges: ascending, not empty, and with numbers between them that are not in the set."""
        self._firsts, self._ends = list[int](), list[int]()
        for one in ranges:
            self._firsts.append(one.start)
            self._ends.append(one.stop)
        for number in numbers:
            self.add(number)

    @property
    def ranges(self) -> int:
        """Number of ranges, which the memory is proportional to."""
        return len(self._firsts)

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._firsts)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._ranges())

    def __sub__(self, other: IntegerSet) -> IntegerSet:
        return IntegerSet(ranges=chain.from_iterable(map(other._gaps, self._ranges())))

    def __str__(self) -> str:
        shown = list(self._ranges())[:MAX_RANGES]
        text = ", ".join(str(one.start) if len(one) == 1 else f"{one.start}-{one.stop - 1}" for one in shown)
        rest = len(self) - sum(map(len, shown))
        return f"{text} and {rest} more" if rest else text

    def add(self, number: int) -> bool:
        """Add a number. Returns False if the set had it."""
        at = bisect_right(self._firsts, number) - 1
        if at >= 0 and number < self._ends[at]:
            return False
        follows = at >= 0 and self._ends[at] == number
        precedes = at + 1 < len(self._firsts) and self._firsts[at + 1] == number + 1
        if follows and precedes:
            del self._firsts[at + 1], self._ends[at]
        elif follows:
            self._ends[at] += 1
        elif precedes:
            self._firsts[at + 1] = number
        else:
            self._firsts.insert(at + 1, number)
            self._ends.insert(at + 1, number + 1)
        return True

    def _ranges(self) -> Iterator[range]:
        return starmap(range, zip(self._firsts, self._ends, strict=True))

    def _gaps(self, within: range) -> Iterator[range]:
        """Yield the parts of a range that are not in the set."""
        start = within.start
        for at in range(bisect_right(self._ends, start), bisect_right(self._firsts, within.stop - 1)):
            if start < self._firsts[at]:
                yield range(start, self._firsts[at])
            start = self._ends[at]
        if start < within.stop:
            yield range(start, within.stop)
