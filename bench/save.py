"""Measures how long saving a checkpoint delays decoding. Measured on Linux and the CPU only, not on Metal.

    python -m bench save [--repeats 5] [--out bench/results/save.jsonl]

The checkpointer writes files in a thread of its own while the decode thread decodes. In a separate process, an engine
decodes eight sequences, first alone, then while five checkpoints of all weights with the moments of AdamW are saved
(300 MB for the model of 25 million weights). The target is at most 100 milliseconds for the longest delay of a decode
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.benchmark import Benchmark
from bench.charts import draw_bars
from bench.contenders.process import Contender, measure_interleaved
from bench.measurement import Case, Measurement, Metric

NAME = "save"
OURS = Contender(name="clotho", module="bench.contenders.clotho_save")
METRICS = (
    Metric(name="longest_delay_seconds", unit="seconds", better="lower"),
    Metric(name="median_delay_seconds", unit="seconds", better="lower"),
    Metric(name="longest_alone_seconds", unit="seconds", better="lower"),
    Metric(name="save_seconds", unit="seconds", better="lower"),
)
MODELS = ("embedded", "6m", "25m")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure decode steps; quick: the smallest model only."""
    cases: list[Case] = [{"model": model} for model in (MODELS[:1] if quick else MODELS)]
    return measure_interleaved(NAME, [OURS], cases, METRICS, repeats=2 if quick else repeats)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """One bar per model."""
    draw_bars(results, "longest_delay_seconds", target, title="longest delay of a decode step while saving")


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=5,
    quick="measure the smallest model",
    measure=measure_all,
)
read, table, main = BENCHMARK.read, BENCHMARK.table, BENCHMARK.main
