"""Measures how long a weight swap delays decoding. Measured on Linux and the CPU only, not on Metal.

    python -m bench swap [--repeats 5] [--out bench/results/swap.jsonl]

A weight swap is what the decode thread does between two decode steps to serve a new policy version. In a separate
process, fifty swaps are measured per repeat, for the embedded policy and for random Qwen3 shapes (see `python -m bench
decode`), with an adapter of rank 8 and with all weights trained. The target is less than one millisecond. `python -m
bench learning` has the exchange of the arrays as runs measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.benchmark import Benchmark
from bench.charts import draw_bars
from bench.contenders.process import Contender, measure_interleaved
from bench.measurement import Case, Measurement, Metric

NAME = "swap"
OURS = Contender(name="clotho", module="bench.contenders.clotho_swap")
METRICS = (
    Metric(name="swap_seconds", unit="seconds", better="lower"),
    Metric(name="longest_swap_seconds", unit="seconds", better="lower"),
)
MODELS = ("embedded", "6m", "25m")


def measure(models: Sequence[str], repeats: int) -> list[Measurement]:
    """Measure swaps in a separate process."""
    cases: list[Case] = [{"model": model, "weights": weights} for model in models for weights in ("lora", "full")]
    return measure_interleaved(NAME, [OURS], cases, METRICS, repeats=repeats)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """One bar per model and training method."""
    draw_bars(results, "swap_seconds", target, title="one weight swap, median")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure all models; quick: the smallest one only."""
    return measure(MODELS[:1], 2) if quick else measure(MODELS, repeats)


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=5,
    quick="measure the smallest model",
    measure=measure_all,
)
read, table, main = BENCHMARK.read, BENCHMARK.table, BENCHMARK.main
