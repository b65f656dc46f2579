"""The table of publications and patches."""

from __future__ import annotations

from bench.measurement import Measurement
from bench.publish import ADAPTER, PATCH, table
from tests.bench.made_measurements import measurement


def patch_of(model: str, metric: str, values: list[float]) -> Measurement:
    """Return a measurement of patches."""
    return measurement(values, metric=metric, way=PATCH, model=model)


def test_the_table_has_the_tail_of_publications_and_the_range_of_patches() -> None:
    """The 95th percentile of 20 publications is the 19th; sizes are shares of the weights."""
    publications = measurement([0.01 * number for number in range(20, 0, -1)], way=ADAPTER, workers=8, rows=0)
    patches = [
        patch_of("a", "patch_share", [0.005, 0.0075]),
        patch_of("a", "make_seconds", [0.1, 0.3]),
        patch_of("a", "apply_seconds", [0.04, 0.04]),
    ]
    text = table([publications, *patches])
    assert "| 0 | 8 | 105 ms | 190 ms | 20 |" in text
    assert "| a | 0.50 % to 0.75 % | 200 ms | 40 ms | 2 |" in text
    assert "95th percentile" not in table(patches)
