"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures how decoding and updates scale with model and batch. Only Clotho is measured.

    python -m bench scaling [--repeats 3] [--out bench/results/scaling.jsonl]

Decoding samples 64 tokens per sequence; unless a case says otherwise, prompts have 128 tokens, groups have 8
completions, and 32 sequences run at once. An update is one policy update. Both run in a separate process, on random
Qwen3 shapes in float32 with tied embeddings (6m: 6 layers of width 256, 25m: 8 layers of width 512) and on the embedded
policy. The fraction of peak is defined in `python -m bench decode`.
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
from bench.tables import closing, markdown, number, spread

NAME = "scaling"
COMMAND = "python -m bench scaling"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
Case = dict[str, str | int | float]

DECODING = Contender(name="clotho", module="bench.contenders.clotho_decode")
LEARNING = Contender(name="clotho", module="bench.contenders.clotho_learn")
RATE = Metric(name="tokens_per_second", unit="tokens/s", better="higher")
PER_TOKEN = Metric(name="microseconds_per_token", unit="µs", better="lower")
PEAK = Metric(name="peak_fraction", unit="peak_fraction", better="higher")
SECONDS = Metric(name="seconds", unit="s", better="lower")
GROUP = 8
VOCABULARIES = {"embedded": 384, "6m": 4096, "25m": 8192}


def decoding(model: str = "6m", *, vocabulary: int = 0, rows: int = 32, prompt_tokens: int = 128) -> Case:
    """One decode case; sequences form groups of 8 if there are at least 8."""
    group = min(rows, GROUP)
    shape: Case = {"model": model, "vocabulary": vocabulary or VOCABULARIES[model]}
    return {**shape, "prompts": rows // group, "group": group, "prompt_tokens": prompt_tokens, "new_tokens": 64}


def learning(model: str = "6m", *, vocabulary: int = 0, completion_tokens: int = 128) -> Case:
    """One update case with a single group."""
    shape: Case = {"model": model, "vocabulary": vocabulary or VOCABULARIES[model]}
    return {**shape, "prompts": 1, "group": GROUP, "prompt_tokens": 128, "completion_tokens": completion_tokens}


LARGEST_VOCABULARY = 151_936
"""`python -m bench head` measures updates with this vocabulary."""
SIZES: tuple[tuple[str, int], ...] = (
    ("embedded", 0),
    ("6m", 0),
    ("6m", 32_768),
    ("6m", LARGEST_VOCABULARY),
    ("25m", 0),
)
ROWS = (1, 2, 4, 8, 16, 32, 64)
SWEEPS: tuple[tuple[str, tuple[str, ...], tuple[Case, ...]], ...] = (
    (
        "Decoding: model and vocabulary",
        ("model", "vocabulary"),
        tuple(decoding(model, vocabulary=vocabulary) for model, vocabulary in SIZES),
    ),
    ("Decoding 6m: number of sequences", ("prompts", "group"), tuple(decoding(rows=rows) for rows in ROWS)),
    (
        "Decoding 6m: prompt length",
        ("prompt_tokens",),
        tuple(decoding(prompt_tokens=length) for length in (16, 128, 512, 1024)),
    ),
    (
        "One update: model and vocabulary",
        ("model", "vocabulary"),
        tuple(
            learning(model, vocabulary=vocabulary) for model, vocabulary in SIZES if vocabulary != LARGEST_VOCABULARY
        ),
    ),
    (
        "One update of 6m: completion length, 8 completions",
        ("completion_tokens",),
        tuple(learning(completion_tokens=length) for length in (32, 64, 128, 256, 512)),
    ),
)
"""Title, varying settings, and cases; a case in several sweeps is measured once."""

QUICK: tuple[Case, ...] = (decoding("embedded"), learning("embedded"))


def measure(cases: Sequence[Case], repeats: int) -> list[Measurement]:
    """Measure all cases, decoding first, with one warmup run each."""
    halves = (DECODING, [RATE, PER_TOKEN, PEAK], "new_tokens"), (LEARNING, [SECONDS, PER_TOKEN], "completion_tokens")
    found = []
    for contender, metrics, key in halves:
        mine = [case for case in cases if key in case]
        found += measure_interleaved(NAME, [contender], mine, metrics, repeats=repeats, command=COMMAND)
    return found


def all_cases() -> list[Case]:
    """Each case once."""
    cases: list[Case] = []
    for _, _, swept in SWEEPS:
        cases += [case for case in swept if case not in cases]
    return cases


def table(results: Sequence[Measurement]) -> str:
    """One table per sweep, one row per case, one column per metric."""
    parts = []
    for title, keys, cases in SWEEPS:
        measured = [[one for one in results if one.case == case] for case in cases]
        if rows := [_row(keys, metrics) for metrics in measured if metrics]:
            names = [one.metric for one in next(filter(None, measured))]
            heading = [name.replace("_", " ") for name in (*keys, *names)]
            parts.append(f"**{title}**\n\n{markdown(heading, rows, text_columns=len(keys))}")
    return "\n\n".join([*parts, closing(results)])


def _row(keys: Sequence[str], metrics: Sequence[Measurement]) -> list[str]:
    """The varying settings and all metrics of one case."""
    varied = [metrics[0].case[key] for key in keys]
    named = [value if isinstance(value, str) else number(value) for value in varied]
    return [*named, *(spread(one.values, one.unit) for one in metrics)]


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Draw tokens per second against the number of sequences that decode at once, for whole groups."""
    wanted = [decoding(rows=rows) for rows in ROWS if rows >= GROUP]
    chosen = [one for one in results if one.case in wanted]
    draw_lines(chosen, RATE.name, "prompts", target, title="decoding 6m, prompts of 8 completions", logarithmic=True)


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="measure the smallest model once",
    results=RESULTS,
    measure=lambda repeats, quick: measure(QUICK, 1) if quick else measure(all_cases(), repeats),
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
