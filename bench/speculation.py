"""Tokens per forward pass and decode rate of speculative rollouts. Measured on Linux and the CPU only, not on Metal.

    python -m bench speculation [--repeats 3] [--out bench/results/speculation.jsonl]

Each contender is a synchronous run of local-m3 on its first 128 problems: one epoch is 8 steps of 16 groups with 8
completions each, and the policy is trained in between. `always` keeps speculation on; without it, a run turns
speculation off where it does not pay. *tokens_per_forward* is the number of sampled tokens divided by the number of
forward passes over a row that sampled them, 1 without drafts. *decode_rate* is sampled tokens per second of decoding,
prefill included. Epochs are counted from 1. On the CPU, decoding is bound by computation: a forward pass over several
tokens of a row costs more than over one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from bench import measurement
from bench.benchmark import Benchmark, run_benchmark
from bench.contenders.process import Metric
from bench.fingerprint import ROOT, fingerprint
from bench.measurement import Measurement, results_path
from bench.runs import run_pipeline
from bench.tables import report

NAME = "speculation"
COMMAND = f"python -m bench {NAME}"
RESULTS = results_path(NAME)
PER_FORWARD = Metric(name="tokens_per_forward", unit="tokens", better="higher")
RATE = Metric(name="decode_rate", unit="tokens/s", better="higher")
PROBLEMS, STEPS_OF_EPOCH, EPOCHS = 128, 8, 3
ALWAYS = ["--engine.speculation.always", "true"]
CONTENDERS: Mapping[str, Sequence[str]] = {
    "off": [],
    "history, always": ["--engine.speculation", "history", *ALWAYS],
    "prompt, always": ["--engine.speculation", "prompt", *ALWAYS],
    "history": ["--engine.speculation", "history"],
}
"""Flags by contender."""


def epochs(metrics: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Yield the metrics of each epoch of a run. Discarded groups count: the engine has sampled them too."""
    ages = [0.0, *(line["time/run"] for line in metrics)]
    sampled = [line["tokens_per_second"] * (ages[i + 1] - ages[i]) for i, line in enumerate(metrics)]
    for first in range(0, len(metrics), STEPS_OF_EPOCH):
        lines = metrics[first : first + STEPS_OF_EPOCH]
        tokens = sum(sampled[first : first + STEPS_OF_EPOCH])
        passes = sum(line["speculation/passes"] for line in lines) or tokens
        seconds = sum(line["time/decode"] for line in lines)
        yield {PER_FORWARD.name: tokens / passes, RATE.name: tokens / seconds}


def measure(contenders: Sequence[str], repeats: int) -> list[Measurement]:
    """Run all contenders, one after the other in each repeat; repeats differ in the seed."""
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as directory:
        problems = Path(directory, "problems.jsonl")
        with (ROOT / "profiles" / "embedded" / "train.jsonl").open(encoding="utf-8") as lines:
            problems.write_text("".join(islice(lines, PROBLEMS)), encoding="utf-8")
        common = ["--profile", "local-m3", "--async", "false", "--eval", "off", "--data.train", str(problems)]
        common += ["--steps", str(EPOCHS * STEPS_OF_EPOCH)]
        for seed in range(repeats):
            for name in contenders:
                run = run_pipeline([*common, "--seed", str(seed), *CONTENDERS[name]])
                found[name].append(list(epochs(run.metrics)))
    here = fingerprint()
    return [
        Measurement(
            question=NAME,
            case={"epoch": epoch + 1},
            contender=name,
            metric=metric.name,
            unit=metric.unit,
            better=metric.better,
            values=[repeat[epoch][metric.name] for repeat in found[name]],
            semantics="A synchronous run of local-m3 on 128 problems; completions of an epoch.",
            versions={"mlx": here.machine.mlx_version},
            command=COMMAND,
            fingerprint=here,
        )
        for epoch in range(EPOCHS)
        for name in contenders
        for metric in (PER_FORWARD, RATE)
    ]


def measure_all(repeats: int, quick: bool) -> list[Measurement]:
    """Measure all contenders; quick: one run without drafts and one with drafts from the history."""
    return measure(list(CONTENDERS)[:2], 1) if quick else measure(list(CONTENDERS), repeats)


def read(path: Path = RESULTS) -> Sequence[Measurement]:
    """Read all results; an empty list if the file does not exist."""
    return measurement.read(path)


def table(results: Sequence[Measurement]) -> str:
    """Format the results as Markdown."""
    return report(results)


BENCHMARK = Benchmark(
    command=COMMAND,
    about=__doc__,
    repeats=3,
    quick="measure one run without drafts and one with drafts from the history",
    results=RESULTS,
    measure=measure_all,
    table=table,
)
main = partial(run_benchmark, BENCHMARK)
