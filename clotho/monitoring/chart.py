"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"


def curve(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """At most `width` characters whose height is the value, from the smallest to the largest; oldest first.

    More values than characters are averaged in equal parts. Values that are not finite are left out.
    """
    finite = [value for value in values if isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    parts = [finite[i * len(finite) // count : (i + 1) * len(finite) // count] for i in range(count)]
    means = [fmean(part) for part in parts]
    low, high = min(means), max(means)
    levels = ASCII if ascii_only else BLOCKS
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)
