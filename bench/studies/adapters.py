"""Decode rate of batches with adapters. Measured on Linux and the CPU only, not on Metal.

    python -m bench adapters [--repeats 5] [--out bench/results/adapters.jsonl]

Every batch has 16 prompts of 32 tokens with 2 completions of 64 tokens: 32 rows, which are decoded together. The rows
use the base model, one adapter of rank 10, eight adapters of ranks 4 to 16 (10 on average), or adapters in one half and
the base model in the other. An adapter changes every linear layer of the blocks. Each kind of batch is a
separate process; processes alternate, and ratios are taken pair by pair. The clock runs while all rows are decoded,
without prefill. Models are those of `python -m bench decode`. On the CPU, a float32 model decodes in NumPy; `mlx` is
the same model with CLOTHO_CPU_KERNELS=0, whose low-rank products are those of a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from bench.benchmark import Benchmark
from bench.charts import draw_bars
from bench.contenders.clotho_adapters import BATCH
from bench.contenders.process import Contender, measure_interleaved
from bench.measurement import Case, Measurement, Metric, ratios
from bench.tables import closing, markdown, side_by_side

NAME = "adapters"
RATE = Metric(name="tokens_per_second", unit="tokens/s", better="higher")
KINDS = {
    "base": "0",
    "one adapter": "1",
    "eight adapters": "8",
    "one adapter and base": "1+base",
    "eight adapters and base": "8+base",
}
PAIRS = (
    ("one adapter", "base", 0.85),
    ("eight adapters", "one adapter", 0.80),
    ("eight adapters and base", "one adapter and base", 0.95),
    ("eight adapters and base", "base", 0.95),
)
"""Numerator, denominator, and the target of the ratio."""


def case(model: str) -> Case:
    """One case."""
    return {"model": model, "prompts": 16, "group": 2, "prompt_tokens": 32, "new_tokens": 64}


def measure(models: Sequence[str], repeats: int, *, kernels: bool = True) -> list[Measurement]:
    """Measure all kinds of batches alternately. kernels: decode in NumPy."""
    environment = {} if kernels else {"CLOTHO_CPU_KERNELS": "0"}
    contenders = [
        Contender(name=name, module="bench.contenders.clotho_adapters", environment={BATCH: kind, **environment})
        for name, kind in KINDS.items()
    ]
    found = measure_interleaved(NAME, contenders, [case(model) for model in models], [RATE], repeats=repeats)
    path = "NumPy" if kernels else "mlx"
    return [replace(one, case={**one.case, "path": path}) for one in found]


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure both models in NumPy and the smaller one in MLX; quick: the smaller one in NumPy, three repeats."""
    if quick:
        return measure(["6m"], 3)
    return [*measure(["6m", "25m"], repeats), *measure(["6m"], repeats, kernels=False)]


def table(results: Sequence[Measurement]) -> str:
    """The rates, and the ratios of batches with their targets."""
    rows = []
    cases = list(dict.fromkeys((str(one.case["model"]), str(one.case["path"])) for one in results))
    for model, path in cases:
        rates = {one.contender: one for one in results if (one.case["model"], one.case["path"]) == (model, path)}
        for above, below, target in PAIRS:
            if above in rates and below in rates:
                found = ratios(rates[above], rates[below])
                shown = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
                rows.append([model, path, f"{above} / {below}", shown, f"{target:.2f}"])
    ratio_table = markdown(["model", "path", "batches", "ratio", "target"], rows, text_columns=3)
    return "\n\n".join([side_by_side(results, RATE.name), ratio_table, closing(results)])


def draw(results: Sequence[Measurement], target: Path) -> None:
    """One bar per kind of batch and model."""
    draw_bars(results, RATE.name, target, title="decode rate of 32 rows by adapters in the batch")


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=5,
    quick="measure the smaller model in NumPy, three repeats",
    measure=measure_all,
    table=table,
)
read, main = BENCHMARK.read, BENCHMARK.main
