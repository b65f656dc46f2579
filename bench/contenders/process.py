"""Start contenders as processes and measure them alternately."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.contenders.worker import LAUNCHED
from bench.fingerprint import ROOT, Fingerprint, fingerprint
from bench.measurement import Case, Measurement, Metric, measured

VARIABLE = "CLOTHO_BENCH_CONTENDERS"
DEFAULT = ROOT / ".contenders" / "bin" / "python"
VERIFIERS = "CLOTHO_VERIFIERS_PYTHON"
INSTALL = "python3.11 -m venv .contenders && .contenders/bin/python -m pip install -r bench/contenders/requirements.txt"


class Contender(Struct, frozen=True, kw_only=True):
    """name: in tables. module: run with `-m`. foreign: runs in the contenders' environment instead of this one.

    environment: variables for this contender only.
    """

    name: str
    module: str
    foreign: bool = False
    environment: Mapping[str, str] = {}


class MissingContendersError(Exception):
    """The contenders' environment does not exist; the message says how to create it."""


class ContenderProcess:
    """A running contender."""

    def __init__(self, process: subprocess.Popen[str], contender: Contender) -> None:
        self._process = process
        self.contender = contender
        hello = self._read()
        self.semantics: str = hello["semantics"]
        self.versions: dict[str, str] = hello["versions"]

    def measure(self, case: Case) -> dict[str, float]:
        """Run a case once. Raises RuntimeError with the contender's error, or if its process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # that it has ended is what reading says next
            self._process.stdin.write(json.dumps(dict(case)) + "\n")
            self._process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{self.contender.name}: {answer['error']}")
        metrics: dict[str, float] = answer["metrics"]
        return metrics

    def kill(self) -> None:
        """End the process at once; a measurement that waits for it fails."""
        self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.contender.name} exited without a result; see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def contenders_python() -> str:
    """The interpreter of the contenders' environment. Raises MissingContendersError."""
    path = os.environ.get(VARIABLE, str(DEFAULT))
    if not os.access(path, os.X_OK):
        raise MissingContendersError(f"the contenders are not installed at {path}; run {INSTALL}, or set {VARIABLE}")
    return path


def verifiers_python() -> str:
    """The interpreter that has verifiers. Raises MissingContendersError."""
    path = Path(os.environ.get(VERIFIERS, ROOT / ".verifiers" / "bin" / "python")).absolute()
    if not os.access(path, os.X_OK):
        install = "python3 -m venv .verifiers && .verifiers/bin/pip install verifiers==0.4.0"
        raise MissingContendersError(f"verifiers is not installed at {path}; run {install}, or set {VERIFIERS}")
    return str(path)


@contextmanager
def running(contender: Contender) -> Iterator[ContenderProcess]:
    """Start a contender; it ends with the block."""
    python = contenders_python() if contender.foreign else sys.executable
    given = {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", LAUNCHED: str(time.time())}
    environment = {**os.environ, **given, **contender.environment}
    process = subprocess.Popen(
        [python, "-m", contender.module],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield ContenderProcess(process, contender)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def measure_interleaved(
    question: str,
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    metrics: Sequence[Metric],
    *,
    repeats: int,
    warm_up: int = 1,
) -> list[Measurement]:
    """Measure every contender in every case: warmup runs, then one run of each alternately, `repeats` times.

    A contender that fails in a case is left out of that case, with a line on standard error.
    """
    found: list[Measurement] = []
    here = fingerprint()
    with ExitStack() as stack:
        running_now = [stack.enter_context(running(contender)) for contender in contenders]
        for case in cases:
            for answers, runs in _interleaved(running_now, case, warm_up + repeats):
                found += _measurements(question, answers, case, metrics, runs[warm_up:], here)
    return found


def _interleaved(
    contenders: Sequence[ContenderProcess], case: Case, times: int
) -> list[tuple[ContenderProcess, list[dict[str, float]]]]:
    """The metrics of every run, without contenders that failed."""
    answered: list[tuple[ContenderProcess, list[dict[str, float]]]] = [(answers, []) for answers in contenders]
    for _ in range(times):
        tried = [(answers, runs, _try(answers, case)) for answers, runs in answered]
        answered = [(answers, [*runs, metrics]) for answers, runs, metrics in tried if metrics is not None]
    return answered


def _try(answers: ContenderProcess, case: Case) -> dict[str, float] | None:
    try:
        return answers.measure(case)
    except RuntimeError as error:
        sys.stderr.write(f"bench: skipped: {error} ({dict(case)})\n")
        return None


def _measurements(
    question: str,
    answers: ContenderProcess,
    case: Case,
    metrics: Sequence[Metric],
    runs: Sequence[dict[str, float]],
    here: Fingerprint,
) -> list[Measurement]:
    name, semantics, versions = answers.contender.name, answers.semantics, answers.versions
    values = {metric: [run[metric.name] for run in runs] for metric in metrics if metric.name in runs[0]}
    return [
        measured(question, case, name, metric, found, here, semantics=semantics, versions=versions)
        for metric, found in values.items()
    ]
