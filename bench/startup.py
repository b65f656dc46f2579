"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the time from the command to the first result.

    python -m bench startup [--repeats 3] [--out bench/results/startup.jsonl]

Wall time and processor time of whole commands, each in its own process, with files in the page cache. `help`: print the
help. `imported`: import everything that training needs. `dry run`: resolve the profile and estimate memory. A peer is
listed where it has an equivalent command. `sampled` and `updated` are runs of the default profile that end after one
update: the time from process start until the learner has all rollouts, and until the update is done. Peers do other
work before that, so they are not listed; `python -m bench startup_training` compares whole runs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.charts import draw_bars
from bench.contenders.process import Contender, Metric, measure_interleaved
from bench.contenders.semantics import SEMANTICS
from bench.fingerprint import ROOT, fingerprint
from bench.measurement import Measurement, results_path
from bench.tables import report

NAME = "startup"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
read = partial(measurement.read, RESULTS)
CONTENDERS = (
    Contender(name="clotho", module="bench.contenders.clotho_startup"),
    Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_startup", foreign=True),
    Contender(name="TRL", module="bench.contenders.trl_startup", foreign=True),
)
METRICS = (
    Metric(name="seconds", unit="seconds", better="lower"),
    Metric(name="cpu_seconds", unit="seconds", better="lower"),
)
CASES = ("help", "dry run", "imported")


def measure(repeats: int, contenders: Sequence[Contender] = CONTENDERS) -> list[Measurement]:
    """Measure commands that end by themselves."""
    cases = [{"until": until} for until in CASES]
    return measure_interleaved(NAME, contenders, cases, METRICS, repeats=repeats, command=COMMAND)


def measure_runs(repeats: int) -> list[Measurement]:
    """Measure the first rollouts and the first update of runs."""
    return list(of_runs([first_update() for _ in range(repeats)]))


class FirstUpdate(NamedTuple):
    """Seconds from process start until all rollouts of the update were complete, and until the update was done."""

    sampled: float
    updated: float


def first_update() -> FirstUpdate:
    """Run the default profile for one update. Raises subprocess.CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        options = ["--steps", "1", "--eval", "off", "--server.port", "0", "--run-dir", str(run)]
        began = time.time()
        command = [sys.executable, "pipeline.py", "--profile", "local-m3", *options]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        return read_first_update(run / "metrics.jsonl", began)


def read_first_update(metrics: Path, began: float) -> FirstUpdate:
    """Read the metrics of a run of one update; the line is written when the update is done."""
    (line,) = metrics.read_bytes().splitlines()
    updated = metrics.stat().st_mtime - began
    return FirstUpdate(updated - msgspec.json.decode(line)["time/update"], updated)


def of_runs(found: Sequence[FirstUpdate]) -> Iterator[Measurement]:
    """One value per run."""
    here = fingerprint()
    for until in FirstUpdate._fields:
        yield Measurement(
            question=NAME,
            case={"until": until},
            contender=CONTENDERS[0].name,
            metric="seconds",
            unit="seconds",
            better="lower",
            values=[getattr(one, until) for one in found],
            semantics=SEMANTICS["runs_startup"],
            versions={"mlx": here.machine.mlx_version},
            command=COMMAND,
            fingerprint=here,
        )


def table(results: Sequence[Measurement]) -> str:
    """Format the results as Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Wall time to each point, for every contender that has it."""
    draw_bars(results, "seconds", target, key="until", title="from the command to the first result")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure commands and runs; quick: Clotho's commands once."""
    return measure(1, CONTENDERS[:1]) if quick else [*measure(repeats), *measure_runs(repeats)]


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="measure Clotho's commands once, no runs",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
