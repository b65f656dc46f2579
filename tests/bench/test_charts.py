"""Charts of measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.charts import colours, draw_bars, draw_lines
from tests.bench.made_measurements import measurement

RESULTS = [
    measurement([1e-3, 2e-3, 3e-3], contender=name, metric="latency", unit="seconds", better="lower", clients=clients)
    for name in ("clotho", "mlx_lm.server")
    for clients in (1, 8, 64)
]


def test_a_contender_has_the_same_color_on_every_chart() -> None:
    """Two contenders on one chart never share a color."""
    assert colours(["clotho", "trl"])["trl"] == colours(["trl"])["trl"]
    assert len(set(colours(["clotho", "mlx-lm", "mlx-lm-lora", "trl", "one", "other"]).values())) == 6


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_drawing_a_chart_twice_gives_equal_bytes(kind: str, tmp_path: Path) -> None:
    """A chart file changes only if its numbers change."""
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "images" / "first.svg", tmp_path / "images" / "second.svg"
    for target in (first, second):
        if kind == "lines":
            draw_lines(RESULTS, "latency", "clients", target, logarithmic=True)
        else:
            draw_bars(RESULTS, "latency", target, key="clients")
    assert first.read_bytes() == second.read_bytes()
    assert b"<svg" in first.read_bytes()


def test_two_cases_with_the_same_axis_value_are_refused(tmp_path: Path) -> None:
    """One contender must have one point per axis value."""
    mixed = [measurement([1.0], batch=8, model=model) for model in ("6m", "25m")]
    with pytest.raises(ValueError, match="the same batch"):
        draw_lines(mixed, "rate", "batch", tmp_path / "chart.svg")
    with pytest.raises(ValueError, match="the same batch"):
        draw_bars(mixed, "rate", tmp_path / "chart.svg", key="batch")
