"""Charts of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.charts import colours, draw_bars, draw_lines
from tests.bench.measured import measurement

RESULTS = [
    measurement([1e-3, 2e-3, 3e-3], contender=name, metric="latency", unit="seconds", better="lower", clients=clients)
    for name in ("clotho", "mlx_lm.server")
    for clients in (1, 8, 64)
]


def test_a_contender_has_the_same_colour_on_every_chart() -> None:
    """Whoever else stands there; two on one chart never have the same."""
    assert colours(["clotho", "trl"])["trl"] == colours(["trl"])["trl"]
    assert len(set(colours(["clotho", "mlx-lm", "mlx-lm-lora", "trl", "one", "other"]).values())) == 6


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_chart_is_drawn_and_the_same_again(kind: str, tmp_path: Path) -> None:
    """Byte for byte, so that it changes only with the numbers."""
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "images" / "first.svg", tmp_path / "images" / "second.svg"
    for target in (first, second):
        if kind == "lines":
            draw_lines(RESULTS, "latency", "clients", target, logarithmic=True)
        else:
            draw_bars(RESULTS, "latency", target, key="clients")
    assert first.read_bytes() == second.read_bytes()
    assert b"<svg" in first.read_bytes()


def test_cases_that_differ_in_more_than_is_drawn_are_refused(tmp_path: Path) -> None:
    """Two points of one contender above one number would be a riddle."""
    mixed = [measurement([1.0], batch=8, model=model) for model in ("6m", "25m")]
    with pytest.raises(ValueError, match="differ in more than batch"):
        draw_lines(mixed, "rate", "batch", tmp_path / "chart.svg")
    with pytest.raises(ValueError, match="differ in more than batch"):
        draw_bars(mixed, "rate", tmp_path / "chart.svg", key="batch")
