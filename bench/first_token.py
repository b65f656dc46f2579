"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the time to the first token against the prompt length, beside mlx-lm.

    python -m bench first_token [--repeats 7] [--out bench/results/first_token.jsonl]

One prompt of random tokens and one completion, on an idle engine. The models are two random Qwen3 shapes in float32;
weights and prompts are the same for both contenders. Each contender is a separate process, and they alternate. No
prefix cache is reused between runs. Prompts are prefilled by mlx-lm's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.charts import draw_lines
from bench.contenders.process import Contender, Metric, measure_interleaved
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "first_token"
COMMAND = "python -m bench first_token"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
Case = dict[str, str | int | float]

CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_first_token"),
    Contender(name="mlx-lm", module="bench.contenders.mlx_lm_first_token", foreign=True),
)
SECONDS = Metric(name="seconds", unit="s", better="lower")
MODELS, LENGTHS = ("6m", "25m"), (16, 128, 512, 1024)


def measure(models: Sequence[str], lengths: Sequence[int], repeats: int) -> list[Measurement]:
    """Measure every model with every prompt length; two warmup runs per case."""
    cases: list[Case] = [{"model": model, "prompt_tokens": length} for model in models for length in lengths]
    return measure_interleaved(NAME, CONTENDERS, cases, [SECONDS], repeats=repeats, command=COMMAND, warm_up=2)


def table(results: Sequence[Measurement]) -> str:
    """One row per model and prompt length."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Draw seconds against prompt length for the largest model."""
    model = results[-1].case["model"]
    chosen = [one for one in results if one.case["model"] == model]
    title = f"first token of {model}, one prompt"
    draw_lines(chosen, SECONDS.name, "prompt_tokens", target, title=title, logarithmic=True)


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=7,
    quick="measure the smallest model with two prompt lengths once",
    results=RESULTS,
    measure=lambda repeats, quick: measure(MODELS[:1], LENGTHS[:2], 1) if quick else measure(MODELS, LENGTHS, repeats),
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
