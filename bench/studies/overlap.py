"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the decode rate while the learner computes an update.

    python -m bench overlap [--repeats 3] [--out bench/results/overlap.jsonl]

Decoding and training compute in threads of their own: at the same time on a CPU of several cores, and in turns on a GPU
or a single core, where decoding receives the fraction `decode_share` of the time while both have work. `kept` is the
decode rate during updates divided by the decode rate alone; the target is at least one half. The worst case is measured
in a separate process: 128 sequences always decode (completions of 96 tokens, 8 per prompt), three seconds without and
at least three seconds with updates of 128 completions of 96 tokens that follow each other without a pause.
`decode_share` is 0.7 in the profile and 0.5 by default. `python -m bench learning` has both rates of a run, where the
learner often waits and fewer sequences run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.benchmark import Benchmark
from bench.charts import draw_bars
from bench.contenders.process import Contender, measure_interleaved
from bench.measurement import Case, Measurement, Metric

NAME = "overlap"
OURS = Contender(name="clotho", module="bench.contenders.clotho_overlap")
METRICS = (
    Metric(name="idle", unit="tokens/s", better="higher"),
    Metric(name="learning", unit="tokens/s", better="higher"),
    Metric(name="kept", unit="share", better="higher"),
)
MODELS, SHARES, ROWS = ("embedded", "6m"), (0.7, 0.5), 128


def measure(models: Sequence[str], shares: Sequence[float], repeats: int) -> list[Measurement]:
    """Measure in a separate process."""
    cases: list[Case] = [{"model": model, "decode_share": share, "rows": ROWS} for model in models for share in shares]
    return measure_interleaved(NAME, [OURS], cases, METRICS, repeats=repeats)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """One bar per case: the fraction of the decode rate that is kept."""
    draw_bars(results, "kept", target, title="decode rate during updates, as a fraction of the rate alone")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure both models and shares; quick: the embedded policy, one share."""
    return measure(MODELS[:1], SHARES[:1], 1) if quick else measure(MODELS, SHARES, repeats)


BENCHMARK = Benchmark(
    name=NAME,
    about=__doc__,
    repeats=3,
    quick="measure the embedded policy with one share",
    measure=measure_all,
)
read, table, main = BENCHMARK.read, BENCHMARK.table, BENCHMARK.main
