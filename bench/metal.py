"""Measures what Clotho does on the GPU of this machine. For owners of a Mac: one command, at most five minutes.

    python -m bench metal [--quick] [--models Qwen3-0.6B] [--seconds 280] [--out FILE]
    python -m bench metal --report FILE [FILE ...]    print the reports of files, and write README's table of Macs

Nothing is downloaded: the models have the shapes of Qwen3-0.6B and Qwen3-1.7B, a hybrid shape and one with experts,
with random 4-bit weights (groups of 64) and LoRA of rank 8 on every linear layer. The report has the decode speed at 1,
4 and 32 rows and the time to the first token beside mlx-lm's BatchGenerator with the same adapter; operations and host
time of a decode step; time, memory and longest turn of an update, beside mlx-lm-lora's if its environment is installed
(bench/contenders/requirements.txt); weight swaps; parity between sampler and learner by number of rows; whether equal
seeds give equal results; and held-out accuracy in the first seconds of the profiles local-m3 and learn-m3.

It prints tables, and a block to paste, and writes a file of JSON lines, which also has chip, macOS, power, heat,
display, wheel, limits and versions: attach the file to a report. Each phase has a time budget. What does not fit is
marked as partial or listed as not measured, and a process that the system ends (too little memory) costs its phase
only. As in a run, the Mac does not sleep, the GPU driver is asked to end less work that delays the display, and only
one process at a time computes.

Without a GPU everything runs on MLX's CPU kernels (CLOTHO_CPU_KERNELS=0). Numbers of operations are then those of
Metal; speeds are not, and prompts have 16 tokens instead of 128. `--quick` measures tiny models in seconds, to check
that the command works.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from bench.contenders.process import Contender, ContenderProcess, MissingContendersError, running
from bench.fingerprint import Fingerprint, fingerprint
from bench.measurement import Case, Measurement, Metric, measured, write
from bench.metal_report import NOT_MEASURED, report, value, what, write_report
from bench.metal_state import machine_state
from bench.runs import accuracies, run_until
from clotho.models.machine import memory_limit
from protocols.compute import MemoryLimit
from training_run.main import RELAXED_GPU_TIMEOUT
from training_run.supervision.idle_sleep import no_idle_sleep

NAME = "metal"
COMMAND = "python -m bench metal"
DEVICE_PATH = {} if platform.system() == "Darwin" else {"CLOTHO_CPU_KERNELS": "0"}
OURS = Contender(name="clotho", module="bench.contenders.clotho_metal", environment=DEVICE_PATH)
MLX_LM = Contender(name="mlx-lm", module="bench.contenders.mlx_lm_metal", environment=DEVICE_PATH)
MLX_LM_LORA = Contender(name="mlx-lm-lora", module="bench.contenders.mlx_lm_lora_metal", foreign=True)

DENSE = ("Qwen3-0.6B", "Qwen3-1.7B")
MODELS = (*DENSE, "hybrid", "experts")
TINY = ("tiny", "tiny hybrid", "tiny experts")
PROFILES = ("local-m3", "learn-m3")
"""Profiles whose first seconds are measured."""

SECONDS = 280.0
LEARNING = 0.25
"""Share of the time for the curves of `PROFILES`."""
LEAST_SECONDS = 1.0
"""A phase with less time is not started."""
GRACE, LEAST_GRACE = 3.0, 45.0
"""A phase is ended after this multiple of its time, and not before so many seconds: some steps cannot be divided, and
the first one loads the model."""

KINDS: tuple[tuple[str, str, Literal["higher", "lower"]], ...] = (
    ("tokens_per_second", "tokens/s", "higher"),
    ("first_token_seconds", "seconds", "lower"),
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
    ("float32_error", "relative error", "lower"),
    ("accuracy", "fraction", "higher"),
    ("limit_bytes", "bytes", "higher"),
    ("installed_bytes", "bytes", "higher"),
)
METRICS = {name: Metric(name=name, unit=unit, better=better) for name, unit, better in KINDS}


class Phase(NamedTuple):
    """A case without its model. weight: share of the time, relative to other phases."""

    case: Case
    contenders: tuple[Contender, ...]
    weight: float


def phases(model: str, *, quick: bool, gpu: bool = False) -> list[Phase]:
    """All phases of a model, the most important first. Without a GPU, prompts are short.

    Only decode steps and an update are measured of models with other layers.
    """
    rows, prompt, steps = ((1, 4), 16, 6) if quick else ((1, 4, 32), 128 if gpu else 16, 64)
    prompts, group, length = (1, 2, 8) if quick else (2, 8, prompt)
    learned: Case = {
        "phase": "update", "prompts": prompts, "group": group, "prompt_tokens": length, "completion_tokens": length,
        "micro_batch_tokens": 2048,
    }  # fmt: skip
    if model not in (*DENSE, TINY[0]):
        return [_decode(4, prompt, steps, (OURS,)), Phase(learned, (OURS,), 3.0)]
    several: Case = {"rows": rows[-1], "group": 8, "prompt_tokens": prompt}
    by_rows = (1, 2) if quick else (1, 2, 8, 32)
    both = (OURS, MLX_LM)
    return [
        Phase({"phase": "graph", "rows": rows[-1]}, both, 0.5),
        *(_decode(one, prompt, steps, both) for one in rows),
        Phase({"phase": "first_token", "prompt_tokens": 4 * prompt}, both, 0.5),
        Phase(learned, (OURS, MLX_LM_LORA), 6.0),
        *(
            Phase({"phase": "parity", "rows": one, "prompt_tokens": 16, "tokens": 4 if quick else 32}, (OURS,), 0.5)
            for one in by_rows
        ),
        Phase({"phase": "swap", "swaps": 5 if quick else 50, **several}, (OURS,), 0.5),
        Phase({"phase": "determinism", "tokens": 4 if quick else 32, **several}, (OURS,), 1.0),
        Phase({"phase": "precision", "size": 256 if quick else 1024}, (OURS,), 0.3),
    ]


def _decode(rows: int, prompt: int, steps: int, contenders: tuple[Contender, ...]) -> Phase:
    return Phase(
        {"phase": "decode", "rows": rows, "group": 8, "prompt_tokens": prompt, "steps": steps}, contenders, 1.0
    )


def unique(phases: Sequence[Phase]) -> list[Contender]:
    """The contenders of phases, each once, in the order of their first phases."""
    found: list[Contender] = []
    for phase in phases:
        found += [contender for contender in phase.contenders if contender not in found]
    return found


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
    """Runs the phases of one model in one process per contender, one contender after another.

    Two processes that compute on Metal at once are known to end in kernel panics. A contender that failed is started
    again for its next phase.
    """

    def __init__(self, clock: Clock, here: Fingerprint) -> None:
        self._clock, self._here = clock, here
        self._stack = ExitStack()
        self._running: dict[str, ContenderProcess] = {}

    def model(self, name: str, phases: Sequence[Phase]) -> Iterator[Measurement]:
        """Measure all phases of a model."""
        for contender in unique(phases):
            with self._stack:
                for phase in phases:
                    if contender in phase.contenders:
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
        except MissingContendersError as error:
            yield self._failure(contender, case, str(error))
            return
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

    def learning(self, profile: str, *, quick: bool, seconds: float) -> Iterator[Measurement]:
        """The held-out accuracy of a profile by step, in a run that ends after so many seconds, or after two steps."""
        flags = ["--profile", profile, "--eval.interval", "1" if quick else "5"]
        flags += ["--steps", "2", "--eval.problems", "8"] if quick else []
        try:
            record = run_until(flags, seconds=max(LEAST_SECONDS, seconds), environment=DEVICE_PATH)
        except subprocess.CalledProcessError as error:
            yield self._failure(OURS, {"phase": "learning", "profile": profile}, str(error))
            return
        for step, _, accuracy in accuracies(record):
            case: Case = {"phase": "learning", "profile": profile, "step": step}
            meaning = "Accuracy on the held-out problems of the profile after so many steps."
            yield self._one(OURS.name, case, METRICS["accuracy"], accuracy, meaning, {})

    def machine(self, state: Case, limit: MemoryLimit) -> Iterator[Measurement]:
        """The state and the memory limit of this machine."""
        case: Case = {"phase": "machine", "source": limit.source, **state}
        for name, size in (("limit_bytes", limit.bytes), ("installed_bytes", limit.installed)):
            yield self._one(OURS.name, case, METRICS[name], size, "Memory limit of a run on this machine.", {})

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
    """Measure all models, and then the profiles, within about `seconds`; yields each result when it is known."""
    here = fingerprint()
    planned = {name: phases(name, quick=quick, gpu=here.machine.backend != "CPU") for name in models}
    weights = [phase.weight for of_model in planned.values() for phase in of_model for _ in phase.contenders]
    learning = LEARNING * sum(weights) / (1.0 - LEARNING)
    clock = Clock(seconds, [*weights, learning])
    yield from Bench(clock, here).machine(machine_state(), memory_limit())
    for name, of_model in planned.items():
        yield from Bench(clock, here).model(name, of_model)
    for profile in PROFILES:
        share = clock.take(learning / len(PROFILES))
        yield from Bench(clock, here).learning(profile, quick=quick, seconds=share)


@contextmanager
def protected() -> Iterator[None]:
    """Protect measurements as runs are protected: the Mac does not sleep, and its GPU driver is patient."""
    if platform.system() == "Darwin":
        os.environ.setdefault(RELAXED_GPU_TIMEOUT, "1")
    with no_idle_sleep(enabled=True):
        yield


def default_file(here: Fingerprint) -> Path:
    """The name of the results file: backend and chip."""
    words = f"{NAME} {here.machine.backend} {here.machine.processor}".lower()
    return Path(re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".jsonl")


def main(argv: Sequence[str]) -> int:
    """Measure, print the tables, and write the file, which is complete after every phase."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="Measure tiny models in seconds.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="Models to measure.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="Time for all phases together.")
    parser.add_argument("--out", type=Path, help="Results file; by default named after backend and chip.")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="Print and publish results of files.")
    chosen = parser.parse_args(argv)
    if chosen.report:
        try:
            sys.stdout.write(write_report(chosen.report) + "\n")
        except (ValueError, OSError, msgspec.MsgspecError) as error:
            parser.error(f"--report: {error}")
        return 0
    models = TINY if chosen.quick else tuple(chosen.models)
    results: list[Measurement] = []
    file: Path = chosen.out or default_file(fingerprint())
    with protected():
        for one in measure(models, quick=chosen.quick, seconds=chosen.seconds):
            results.append(one)
            write(file, results)
            sys.stderr.write(f"{what(one)}, {one.contender}: {_line(one)}\n")
    sys.stdout.write(f"{report(results)}\n\nwritten to {file}; attach it to a report\n")
    return 0


def _line(one: Measurement) -> str:
    if one.metric == NOT_MEASURED:
        return f"not measured: {one.semantics}"
    return f"{one.metric.replace('_', ' ')} {value(one)}"
