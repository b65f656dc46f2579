"""Start training runs as a user does, and read the files that they write."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.fingerprint import ROOT

Metrics = list[dict[str, Any]]


class Record(NamedTuple):
    """The lines of a run's metrics.jsonl, evaluations.jsonl and log.jsonl, and its resolved profile.

    launched: when the process was started, in seconds since 1970.
    """

    metrics: Metrics
    log: list[dict[str, Any]]
    profile: dict[str, Any]
    launched: float
    evaluations: Sequence[dict[str, Any]] = ()


def run_pipeline(arguments: Sequence[str]) -> Record:
    """Run `python pipeline.py` with `arguments` in a temporary run directory and read what it wrote.

    Raises subprocess.CalledProcessError if the exit status is not 0.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        command = [sys.executable, "pipeline.py", "--run-dir", str(run), "--server.port", "0", *arguments]
        launched = time.time()
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        profile = tomllib.loads((run / "profile.toml").read_text(encoding="utf-8"))
        return Record(
            metrics=_lines(run / "metrics.jsonl"),
            log=_lines(run / "log.jsonl"),
            profile=profile,
            launched=launched,
            evaluations=_lines(run / "evaluations.jsonl"),
        )


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def accuracies(record: Record) -> list[tuple[int, float, float]]:
    """(step, seconds, held-out accuracy) of every evaluation, ordered by step.

    seconds: from the start of the run to the update that produced the evaluated weights, without the evaluation itself.
    """
    seconds = {line["step"]: line["time/run"] for line in record.metrics}
    return [(line["step"], seconds.get(line["step"], 0.0), line["accuracy"]) for line in record.evaluations]
