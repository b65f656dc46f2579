"""Measures how long a weight swap delays decoding. Measured on Linux and the CPU only, not on Metal.

    python -m bench swap [--repeats 5] [--out bench/results/swap.jsonl]

A weight swap is what the decode thread does between two decode steps to serve a new policy version. It is measured in
two ways. First, in a separate process, fifty swaps per repeat, for the embedded policy and for random Qwen3 shapes (see
`python -m bench decode`), with an adapter of rank 8 and with all weights trained. Second, in runs of the default
profile with seeds 0, 1, ...: the metric of the run covers the exchange of the arrays and nothing else. The target is
less than one millisecond.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.charts import draw_bars
from bench.contenders.process import Contender, Metric, measure_interleaved
from bench.contenders.semantics import SEMANTICS
from bench.fingerprint import fingerprint
from bench.measurement import Measurement, results_path
from bench.runs import Record, run_pipeline
from bench.tables import report

NAME = "swap"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
OURS = Contender(name="clotho", module="bench.contenders.clotho_swap")
METRICS = (
    Metric(name="swap_seconds", unit="seconds", better="lower"),
    Metric(name="longest_swap_seconds", unit="seconds", better="lower"),
)
IN_A_RUN: dict[str, str | int | float] = {"model": "embedded, a run of local-m3", "weights": "lora"}
MODELS = ("embedded", "6m", "25m")
STEPS, RUNS = 8, 2


def measure(models: Sequence[str], repeats: int) -> list[Measurement]:
    """Measure swaps in a separate process."""
    cases = [{"model": model, "weights": weights} for model in models for weights in ("lora", "full")]
    return measure_interleaved(NAME, [OURS], cases, METRICS, repeats=repeats, command=COMMAND)


def measure_runs(count: int, steps: int) -> list[Measurement]:
    """Measure swaps in runs of the default profile, one per seed."""
    arguments = ["--profile", "local-m3", "--eval", "off", "--steps", str(steps)]
    swaps = [swap_seconds(run_pipeline([*arguments, "--seed", str(seed)])) for seed in range(count)]
    return list(of_runs(swaps))


def swap_seconds(run: Record) -> list[float]:
    """Duration of every swap that finished before its metrics line was written."""
    return [line["time/weight_swap"] for line in run.metrics if line["time/weight_swap"] is not None]


def of_runs(swaps: Sequence[Sequence[float]]) -> Iterator[Measurement]:
    """Median and longest swap of each run."""
    versions, here = {"mlx": fingerprint().machine.mlx_version}, fingerprint()
    for metric, values in zip(METRICS, ([statistics.median(s) for s in swaps], [max(s) for s in swaps]), strict=True):
        yield Measurement(
            question=NAME,
            case=IN_A_RUN,
            contender=OURS.name,
            metric=metric.name,
            unit=metric.unit,
            better=metric.better,
            values=values,
            semantics=SEMANTICS["runs_swap"],
            versions=versions,
            command=COMMAND,
            fingerprint=here,
        )


def table(results: Sequence[Measurement]) -> str:
    """Format the results as Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """One bar per model and training method."""
    draw_bars(results, "swap_seconds", target, title="one weight swap, median")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure in a process and in runs; quick: the smallest model only, and no runs."""
    return measure(MODELS[:1], repeats=2) if quick else [*measure(MODELS, repeats), *measure_runs(RUNS, STEPS)]


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=5,
    quick="measure the smallest model, no runs",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
