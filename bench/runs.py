"""Start training runs as a user does, and read the files that they write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from bench.fingerprint import ROOT

Metrics = list[dict[str, Any]]

POLL_SECONDS = 0.2
"""Time between two looks at the files of a run."""


class Record(NamedTuple):
    """The lines of a run's metrics.jsonl, evaluations.jsonl and log.jsonl, and its resolved profile.

    launched: when the process was started, in seconds since 1970. status: exit status of the process. elapsed,
    cpu_seconds: duration and processor time of the process. adapters: its directory, until the run is closed.
    """

    metrics: Metrics
    log: list[dict[str, Any]]
    profile: dict[str, Any]
    launched: float
    evaluations: Sequence[dict[str, Any]] = ()
    status: int = 0
    elapsed: float = 0.0
    cpu_seconds: float = 0.0
    adapters: Path = Path()


class PipelineRun:
    """A process `python pipeline.py` with a temporary run directory, which `close` or the end of the block removes."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
        root: Path = ROOT,
        before: Sequence[str] = (),
    ) -> None:
        """environment: variables of this run only. quiet: discard its standard output. root: of the sources.

        before: words of the command before the program.
        """
        self._directory = tempfile.TemporaryDirectory()
        self._run = Path(self._directory.name, "run")
        own = ["--run-dir", str(self._run), *(() if "--server.port" in arguments else ("--server.port", "0"))]
        self._launched, self._ended, self._cpu_seconds = time.time(), 0.0, 0.0
        self._process = subprocess.Popen(
            [*before, sys.executable, "pipeline.py", *own, *arguments],
            cwd=root,
            stdout=subprocess.DEVNULL if quiet else sys.stderr,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self) -> PipelineRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process if it is still running, and remove the run directory."""
        if not self._ended:
            self._process.kill()
            self.ended(wait=True)
        self._directory.cleanup()

    def ended(self, *, wait: bool = False) -> bool:
        """Whether the process has ended. wait: wait for its end."""
        if not self._ended:
            found, status, used = os.wait4(self._process.pid, 0 if wait else os.WNOHANG)
            if found:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._ended, self._cpu_seconds = time.time(), used.ru_utime + used.ru_stime
        return bool(self._ended)

    def best_accuracy(self) -> float:
        """The highest accuracy of the evaluations so far; 0 without one."""
        return max((line["accuracy"] or 0.0 for line in json_lines(self._run / "evaluations.jsonl")), default=0.0)

    def training_seconds(self) -> float:
        """Seconds from the first prompt to the latest update; 0 before the first update."""
        metrics = _ends(self._run / "metrics.jsonl")
        return metrics[-1]["time/run"] - training_began(metrics) if metrics else 0.0

    def drain(self) -> None:
        """Let the run end after the groups in flight."""
        self._process.send_signal(signal.SIGINT)

    def record(self) -> Record:
        """Wait for the end and read the files. Raises subprocess.CalledProcessError if there was no update."""
        self.ended(wait=True)
        metrics = json_lines(self._run / "metrics.jsonl")
        if not metrics:
            raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
        return Record(
            metrics=metrics,
            log=json_lines(self._run / "log.jsonl"),
            profile=tomllib.loads((self._run / "profile.toml").read_text(encoding="utf-8")),
            launched=self._launched,
            evaluations=json_lines(self._run / "evaluations.jsonl"),
            status=self._process.returncode,
            elapsed=self._ended - self._launched,
            cpu_seconds=self._cpu_seconds,
            adapters=self._run / "adapters",
        )


def run_pipeline(arguments: Sequence[str]) -> Record:
    """Run `python pipeline.py` with `arguments` in a temporary run directory and read what it wrote.

    Raises subprocess.CalledProcessError if the exit status is not 0.
    """
    with PipelineRun(arguments) as running:
        record = running.record()
    if record.status:
        raise subprocess.CalledProcessError(record.status, ["pipeline.py", *arguments])
    return record


def run_until(arguments: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Record:
    """Run as `run_pipeline`, and drain the run after this time of training.

    Raises subprocess.CalledProcessError if the exit status is neither 0 nor that of a drained run.
    """
    with PipelineRun(arguments, environment=environment) as running:
        while not running.ended():
            time.sleep(POLL_SECONDS)
            if running.training_seconds() >= seconds:
                running.drain()
                break
        record = running.record()
    if record.status not in (0, 128 + signal.SIGINT):
        raise subprocess.CalledProcessError(record.status, ["pipeline.py", *arguments])
    return record


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _ends(path: Path) -> Metrics:
    """The first and the last complete line of a file; empty without lines."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line) for line in (*lines[:1], *lines[-1:])]


def training_began(metrics: Metrics) -> float:
    """Age of the run, in seconds, when it sampled its first prompt."""
    first = metrics[0]
    return float(first["time/run"] - first["time/update"] - first["time/wait_for_rollouts"])


def accuracies(record: Record) -> list[tuple[int, float, float]]:
    """(step, seconds, held-out accuracy) of every evaluation, ordered by step.

    seconds: from the start of the run to the update that produced the evaluated weights, without the evaluation itself.
    """
    seconds = {line["step"]: line["time/run"] for line in record.metrics}
    return [(line["step"], seconds.get(line["step"], 0.0), line["accuracy"]) for line in record.evaluations]
