"""How long does a weight swap hold up decoding.

    python -m bench swap [--repeats 5] [--out bench/results/swap.jsonl]

A swap is what the compute thread does, between two ticks of decoding, to make an update the policy that serves. It is
measured in a process of its own, fifty times per repeat, for the policy that ships with the project and for random
Qwen3 shapes (`python -m bench decode` says which), with an adapter of rank 8 and with all weights trained; and read off
runs of the default profile, with seeds 0, 1 ..., where `swap_seconds` of their metrics is the moment of changing the
pointers, and nothing else. Less than a millisecond is the aim.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bench import measurement
from bench.answering import Question, answer
from bench.charts import draw_bars
from bench.contenders.process import Contender, Metric, by_turns
from bench.fingerprint import fingerprint
from bench.measurement import Measurement, results_path
from bench.runs import Record, run_pipeline, updates
from bench.tables import report

NAME = "swap"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
OURS = Contender(name="clotho", module="bench.contenders.clotho_swap")
METRICS = (
    Metric(name="swap_seconds", unit="seconds", better="lower"),
    Metric(name="longest_swap_seconds", unit="seconds", better="lower"),
)
IN_A_RUN: dict[str, str | int | float] = {"model": "embedded, a run of local-m3", "weights": "lora"}
MODELS = ("embedded", "6m", "25m")
STEPS, RUNS = 8, 2
SAID = "As the run measures it itself: changing the pointers, median and longest of all updates of a run."


def measure(models: Sequence[str], repeats: int) -> list[Measurement]:
    """In a process of its own."""
    cases = [{"model": model, "weights": weights} for model in models for weights in ("lora", "full")]
    return by_turns(NAME, [OURS], cases, METRICS, repeats=repeats, command=COMMAND)


def measure_runs(count: int, steps: int) -> list[Measurement]:
    """In runs of the default profile, one per seed."""
    arguments = ["--profile", "local-m3", "--eval.enabled", "false", "--steps", str(steps)]
    swaps = [swap_seconds(run_pipeline([*arguments, "--seed", str(seed)])) for seed in range(count)]
    return list(of_runs(swaps))


def swap_seconds(run: Record) -> list[float]:
    """Of every update that was followed by a swap before its line was written."""
    return [line["swap_seconds"] for line in updates(run.metrics) if line["swap_seconds"] is not None]


def of_runs(swaps: Sequence[Sequence[float]]) -> Iterator[Measurement]:
    """Medians and longest of the swaps of some runs."""
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
            semantics=SAID,
            versions=versions,
            command=COMMAND,
            fingerprint=here,
        )


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """All results; none where there is no file."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """The results in Markdown."""
    return report(results)


def draw(results: Sequence[Measurement], target: Path) -> None:
    """A bar per model and kind of training."""
    draw_bars(results, "swap_seconds", target, title="one weight swap, median")


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """In process and in runs; quick: the smallest model alone, and no runs."""
    return measure(MODELS[:1], repeats=2) if quick else [*measure(MODELS, repeats), *measure_runs(RUNS, STEPS)]


QUESTION = Question(
    command=COMMAND,
    about=__doc__,
    repeats=5,
    quick="the smallest model alone, and no runs",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(answer, QUESTION)
