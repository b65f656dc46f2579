"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the time to the first token against the prompt length, beside mlx-lm.

    python -m bench first_token [--repeats 7] [--out bench/results/first_token.jsonl]

One prompt of random tokens and one completion, on an idle engine. The models are two random Qwen3 shapes in float32;
weights and prompts are the same for both contenders. Each contender is a separate process, and they alternate. No
prefix cache is reused between runs. Prompts are prefilled by mlx-lm's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.benchmark import Benchmark
from bench.charts import draw_lines
from bench.contenders.process import Contender, measure_interleaved
from bench.measurement import Case, Measurement, Metric

NAME = "first_token"
CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_first_token"),
    Contender(name="mlx-lm", module="bench.contenders.mlx_lm_first_token", foreign=True),
)
SECONDS = Metric(name="seconds", unit="s", better="lower")
MODELS, LENGTHS = ("6m", "25m"), (16, 128, 512, 1024)


def measure(models: Sequence[str], lengths: Sequence[int], repeats: int) -> list[Measurement]:
    """Measure every model with every prompt length; two warmup runs per case."""
    cases: list[Case] = [{"model": model, "prompt_tokens": length} for model in models for length in lengths]
    return measure_interleaved(NAME, CONTENDERS, cases, [SECONDS], repeats=repeats, warm_up=2)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Draw seconds against prompt length for the largest model."""
    model = results[-1].case["model"]
    chosen = [one for one in results if one.case["model"] == model]
    title = f"first token of {model}, one prompt"
    draw_lines(chosen, SECONDS.name, "prompt_tokens", target, title=title, logarithmic=True)


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=7,
    quick="measure the smallest model with two prompt lengths once",
    measure=lambda repeats, quick: measure(MODELS[:1], LENGTHS[:2], 1) if quick else measure(MODELS, LENGTHS, repeats),
)
read, table, main = BENCHMARK.read, BENCHMARK.table, BENCHMARK.main
