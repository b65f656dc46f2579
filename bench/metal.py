"""Measures what Clotho does on the GPU of this machine. For owners of a Mac: one command, at most five minutes.

    python -m bench metal [--quick] [--models Qwen3-0.6B] [--seconds 280] [--out FILE]

Nothing is downloaded: the models have the shapes of Qwen3-0.6B and Qwen3-1.7B with random 4-bit weights (groups of 64)
and LoRA of rank 8 on every linear layer. The report has the decode speed at 1, 4 and 32 rows beside mlx-lm's
BatchGenerator with the same adapter; operations and host time of a decode step; time, memory and longest turn of an
update; weight swaps; parity between sampler and learner by number of rows; and whether equal seeds give equal results.

It prints tables and writes a file of JSON lines, which also names chip, system, versions and backend: attach the file
to a report. Each phase has a time budget. What does not fit is marked as partial or listed as not measured, and a
process that the system ends (too little memory) costs its phase only.

Without a GPU everything runs on MLX's CPU kernels (CLOTHO_CPU_KERNELS=0). Numbers of operations are then those of
Metal; speeds are not, and prompts have 16 tokens instead of 128. `--quick` measures a tiny model in seconds, to check
that the command works.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from bench.contenders.process import Contender, ContenderProcess, running
from bench.fingerprint import Fingerprint, fingerprint
from bench.measurement import Case, Measurement, Metric, measured, write
from bench.tables import SCALES, closing, markdown, side_by_side, spread
from clotho.models.machine import memory_limit
from protocols.summary import MemoryLimit

NAME = "metal"
COMMAND = "python -m bench metal"
DEVICE_PATH = {"CLOTHO_CPU_KERNELS": "0"}
OURS = Contender(name="clotho", module="bench.contenders.clotho_metal", environment=DEVICE_PATH)
MLX_LM = Contender(name="mlx-lm", module="bench.contenders.mlx_lm_metal", environment=DEVICE_PATH)

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B")
TINY = "tiny"
SECONDS = 280.0
LEAST_SECONDS = 1.0
"""A phase with less time is not started."""
GRACE, LEAST_GRACE = 3.0, 45.0
"""A phase is ended after this multiple of its time, and not before so many seconds: some steps cannot be divided, and
the first one loads the model."""
NOT_MEASURED = "not_measured"

KINDS: tuple[tuple[str, str, Literal["higher", "lower"]], ...] = (
    ("tokens_per_second", "tokens/s", "higher"),
    ("build_seconds", "seconds", "lower"),
    ("host_seconds", "seconds", "lower"),
    ("nodes", "nodes", "lower"),
    ("kernels", "kernels", "lower"),
    ("seconds", "seconds", "lower"),
    ("turns", "turns", "lower"),
    ("longest_turn_seconds", "seconds", "lower"),
    ("peak_bytes", "bytes", "lower"),
    ("swap_seconds", "seconds", "lower"),
    ("longest_swap_seconds", "seconds", "lower"),
    ("mean_kl", "nats", "lower"),
    ("largest_nats", "nats", "lower"),
    ("served_kl", "nats", "lower"),
    ("samples_equal", "fraction", "higher"),
    ("updates_equal", "fraction", "higher"),
    ("limit_bytes", "bytes", "higher"),
    ("installed_bytes", "bytes", "higher"),
)
METRICS = {name: Metric(name=name, unit=unit, better=better) for name, unit, better in KINDS}

COMPARED = ("tokens_per_second", "build_seconds", "host_seconds", "nodes", "kernels")
"""Metrics with a table of their own, beside mlx-lm."""


class Phase(NamedTuple):
    """A case without its model. weight: share of the time, relative to other phases."""

    case: Case
    contenders: tuple[Contender, ...]
    weight: float


def phases(*, quick: bool, gpu: bool = False) -> list[Phase]:
    """All phases of a model, the most important first. Without a GPU, prompts are short."""
    rows, prompt, steps = ((1, 4), 16, 6) if quick else ((1, 4, 32), 128 if gpu else 16, 64)
    decode = [
        Phase(
            {"phase": "decode", "rows": one, "group": 8, "prompt_tokens": prompt, "steps": steps}, (OURS, MLX_LM), 1.0
        )
        for one in rows
    ]
    prompts, group, length = (1, 2, 8) if quick else (2, 8, prompt)
    learned: Case = {
        "phase": "update", "prompts": prompts, "group": group, "prompt_tokens": length, "completion_tokens": length,
        "micro_batch_tokens": 2048,
    }  # fmt: skip
    several: Case = {"rows": rows[-1], "group": 8, "prompt_tokens": prompt}
    by_rows = (1, 2) if quick else (1, 2, 8, 32)
    return [
        Phase({"phase": "graph", "rows": rows[-1]}, (OURS, MLX_LM), 0.5),
        *decode,
        Phase(learned, (OURS,), 6.0),
        *(
            Phase({"phase": "parity", "rows": one, "prompt_tokens": 16, "tokens": 4 if quick else 32}, (OURS,), 0.5)
            for one in by_rows
        ),
        Phase({"phase": "swap", "swaps": 5 if quick else 50, **several}, (OURS,), 0.5),
        Phase({"phase": "determinism", "tokens": 4 if quick else 32, **several}, (OURS,), 1.0),
    ]


class Clock:
    """Time that is left for the phases of all models. A phase gets its share of the rest; unused time is given on."""

    def __init__(self, seconds: float, weights: Sequence[float]) -> None:
        self._end = time.monotonic() + seconds
        self._weight = sum(weights)

    def take(self, weight: float) -> float:
        """Seconds for the next measurement, which has this weight."""
        share = weight / max(self._weight, weight)
        self._weight -= weight
        return max(0.0, self._end - time.monotonic()) * share

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._end - time.monotonic()


class Bench:
    """Runs the phases of one model after another in one process per contender.

    A contender that failed is started again for its next phase.
    """

    def __init__(self, clock: Clock, here: Fingerprint) -> None:
        self._clock, self._here = clock, here
        self._stack = ExitStack()
        self._running: dict[str, ContenderProcess] = {}

    def model(self, name: str, phases: Sequence[Phase]) -> Iterator[Measurement]:
        """Measure all phases of a model."""
        with self._stack:
            for phase in phases:
                for contender in phase.contenders:
                    yield from self._measured(contender, {"model": name, **phase.case}, phase.weight)
            self._running.clear()

    def _measured(self, contender: Contender, case: Case, weight: float) -> Iterator[Measurement]:
        seconds = self._clock.take(weight)
        if seconds < LEAST_SECONDS:
            yield self._failure(contender, case, "the time is over")
            return
        limit = min(max(GRACE * seconds, LEAST_GRACE), self._clock.left)
        over = threading.Event()
        try:
            process = self._running.get(contender.name) or self._started(contender)
            with _killed_after(process, limit, over):
                metrics = process.measure({**case, "seconds": seconds})
        except RuntimeError as error:
            self._running.pop(contender.name, None)
            yield self._failure(contender, case, f"no result within {limit:.0f} s" if over.is_set() else str(error))
            return
        yield from self._measurements(contender, case, metrics, process.semantics, process.versions)

    def _started(self, contender: Contender) -> ContenderProcess:
        self._running[contender.name] = self._stack.enter_context(running(contender))
        return self._running[contender.name]

    def _measurements(
        self,
        contender: Contender,
        case: Case,
        metrics: Mapping[str, float],
        semantics: str,
        versions: dict[str, str],
    ) -> Iterator[Measurement]:
        marked = case | ({"partial": "yes"} if metrics.get("partial") else {})
        for name, metric in METRICS.items():
            if name in metrics:
                yield self._one(contender.name, marked, metric, metrics[name], semantics, versions)

    def _failure(self, contender: Contender, case: Case, reason: str) -> Measurement:
        return self._one(contender.name, case, Metric(name=NOT_MEASURED, unit="", better="lower"), 1.0, reason, {})

    def memory(self, limit: MemoryLimit) -> Iterator[Measurement]:
        """The memory limit of this machine."""
        case: Case = {"phase": "memory", "source": limit.source}
        for name, value in (("limit_bytes", limit.bytes), ("installed_bytes", limit.installed)):
            yield self._one(OURS.name, case, METRICS[name], value, "Memory limit of a run on this machine.", {})

    def _one(
        self, contender: str, case: Case, metric: Metric, value: float, semantics: str, versions: dict[str, str]
    ) -> Measurement:
        return measured(NAME, case, contender, metric, [value], self._here, semantics=semantics, versions=versions)


@contextmanager
def _killed_after(process: ContenderProcess, seconds: float, over: threading.Event) -> Iterator[None]:
    """End the process if the context takes longer, and set `over`."""

    def kill() -> None:
        over.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def measure(models: Sequence[str], *, quick: bool, seconds: float) -> Iterator[Measurement]:
    """Measure all models within about `seconds`; yields each result when it is known."""
    here = fingerprint()
    planned = phases(quick=quick, gpu=here.machine.backend != "CPU")
    weights = [phase.weight for phase in planned for _ in phase.contenders] * len(models)
    clock = Clock(seconds, weights)
    yield from Bench(clock, here).memory(memory_limit())
    for name in models:
        yield from Bench(clock, here).model(name, planned)


def report(results: Sequence[Measurement]) -> str:
    """Tables of the results: beside mlx-lm, then Clotho alone, then what was not measured."""
    measured = [one for one in results if one.metric != NOT_MEASURED]
    compared = [metric for metric in COMPARED if metric in {one.metric for one in measured}]
    tables = [_heading(results[0].fingerprint), *(side_by_side(measured, metric) for metric in compared)]
    if alone := [one for one in measured if one.metric not in COMPARED]:
        rows = [[_what(one), one.metric.replace("_", " "), _value(one)] for one in alone]
        tables.append(markdown(["case", "metric", "clotho"], rows, text_columns=2))
    if missing := [one for one in results if one.metric == NOT_MEASURED]:
        rows = [[_what(one), one.contender, one.semantics] for one in missing]
        tables.append(markdown(["not measured", "contender", "reason"], rows, text_columns=3))
    return "\n\n".join([*tables, closing(measured)])


def _heading(measured_on: Fingerprint) -> str:
    machine = measured_on.machine
    where = f"{machine.processor} ({machine.device}), {machine.system}, backend {machine.backend}"
    if machine.backend == "CPU":
        return f"{where}: without a GPU, only nodes and kernels say anything about Metal."
    return where


def _what(one: Measurement) -> str:
    keys = ("model", "phase", "rows", "source", "partial")
    words = [f"{key} {one.case[key]}" if key == "rows" else str(one.case[key]) for key in keys if key in one.case]
    return ", ".join("partial" if word == "yes" else word for word in words)


def _value(one: Measurement) -> str:
    unit = "" if one.unit in SCALES or one.unit == one.metric else f" {one.unit}"
    return spread(one.values, one.unit) + unit


def default_file(here: Fingerprint) -> Path:
    """The name of the results file: backend and chip."""
    words = f"{NAME} {here.machine.backend} {here.machine.processor}".lower()
    return Path(re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".jsonl")


def main(argv: Sequence[str]) -> int:
    """Measure, print the tables, and write the file, which is complete after every phase."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="Measure a tiny model in seconds.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="Models to measure.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="Time for all phases together.")
    parser.add_argument("--out", type=Path, help="Results file; by default named after backend and chip.")
    chosen = parser.parse_args(argv)
    models = (TINY,) if chosen.quick else tuple(chosen.models)
    results: list[Measurement] = []
    file: Path = chosen.out or default_file(fingerprint())
    for one in measure(models, quick=chosen.quick, seconds=chosen.seconds):
        results.append(one)
        write(file, results)
        sys.stderr.write(f"{_what(one)}, {one.contender}: {_line(one)}\n")
    sys.stdout.write(f"{report(results)}\n\nwritten to {file}; attach it to a report\n")
    return 0


def _line(one: Measurement) -> str:
    if one.metric == NOT_MEASURED:
        return f"not measured: {one.semantics}"
    return f"{one.metric.replace('_', ' ')} {_value(one)}"
