"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the decode rate while the learner computes an update.

    python -m bench overlap [--repeats 3] [--out bench/results/overlap.jsonl]

Decoding and training compute in threads of their own: at the same time on a CPU of several cores, and in turns on a GPU
or a single core, where decoding receives the fraction `decode_share` of the time while both have work. `kept` is the
decode rate during updates divided by the decode rate alone; the target is at least one half. The worst case is measured
in a separate process: 128 sequences always decode (completions of 96 tokens, 8 per prompt), three seconds without and
at least three seconds with updates of 128 completions of 96 tokens that follow each other without a pause. In runs of
the default profile, one per seed, the two rates come from the last line of the metrics; there the learner often waits
and fewer sequences run. `decode_share` is 0.7 in the profile and 0.5 by default.
"""

from __future__ import annotations

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

NAME = "overlap"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
OURS = Contender(name="clotho", module="bench.contenders.clotho_overlap")
METRICS = (
    Metric(name="idle", unit="tokens/s", better="higher"),
    Metric(name="learning", unit="tokens/s", better="higher"),
    Metric(name="kept", unit="share", better="higher"),
)
MODELS, SHARES, ROWS = ("embedded", "6m"), (0.7, 0.5), 128
SEEDS, STEPS = 3, 24
Rates = dict[str, float]
Case = dict[str, str | int | float]


def measure(models: Sequence[str], shares: Sequence[float], repeats: int) -> list[Measurement]:
    """Measure in a separate process."""
    cases: list[Case] = [{"model": model, "decode_share": share, "rows": ROWS} for model in models for share in shares]
    return measure_interleaved(NAME, [OURS], cases, METRICS, repeats=repeats, command=COMMAND)


def measure_runs(share: float, seeds: int) -> list[Measurement]:
    """Measure runs of the default profile, one per seed."""
    arguments = ["--profile", "local-m3", "--eval", "off", "--steps", str(STEPS)]
    arguments += ["--engine.decode-share", str(share)]
    return list(of_runs(share, [rates(run_pipeline([*arguments, "--seed", str(seed)])) for seed in range(seeds)]))


def rates(run: Record) -> Rates:
    """Decode rates at the end of a run. Raises ValueError if the run never decoded alone or never during an update."""
    last = run.metrics[-1]
    idle, learning = last["decode_tokens_per_second/idle"], last["decode_tokens_per_second/learning"]
    if not idle or not learning:
        raise ValueError(f"a decode rate is missing: {idle} tokens/s alone, {learning} during updates")
    return {"idle": idle, "learning": learning, "kept": learning / idle}


def of_runs(share: float, found: Sequence[Rates]) -> Iterator[Measurement]:
    """One value per run."""
    here = fingerprint()
    for metric in METRICS:
        yield Measurement(
            question=NAME,
            case={"model": "embedded, a run of local-m3", "decode_share": share},
            contender=OURS.name,
            metric=metric.name,
            unit=metric.unit,
            better=metric.better,
            values=[one[metric.name] for one in found],
            semantics=SEMANTICS["runs_overlap"],
            versions={"mlx": here.machine.mlx_version},
            command=COMMAND,
            fingerprint=here,
        )


def table(results: Sequence[Measurement]) -> str:
    """Format the results as Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """One bar per case: the fraction of the decode rate that is kept."""
    draw_bars(results, "kept", target, title="decode rate during updates, as a fraction of the rate alone")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure in a process and in runs; quick: the embedded policy, one share, no runs."""
    if quick:
        return measure(MODELS[:1], SHARES[:1], repeats=1)
    return [*measure(MODELS, SHARES, repeats), *(one for share in SHARES for one in measure_runs(share, SEEDS))]


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="measure the embedded policy with one share",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
