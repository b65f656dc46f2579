"""Runs of the pipeline, driven as a user would, and what they wrote."""

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
    """The lines of a run's metrics.jsonl, and of its log.jsonl; its resolved profile.

    launched: when its process was started, seconds since 1970.
    """

    metrics: Metrics
    log: list[dict[str, Any]]
    profile: dict[str, Any]
    launched: float


def run_pipeline(arguments: Sequence[str]) -> Record:
    """Run `python pipeline.py` with `arguments` in a directory of its own; what it wrote there.

    Raises subprocess.CalledProcessError if it ends with another status than 0.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        command = [sys.executable, "pipeline.py", "--run-dir", str(run), "--server.port", "0", *arguments]
        launched = time.time()
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        profile = tomllib.loads((run / "profile.toml").read_text(encoding="utf-8"))
        return Record(_lines(run / "metrics.jsonl"), _lines(run / "log.jsonl"), profile, launched)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def accuracies(metrics: Metrics) -> list[tuple[int, float, float]]:
    """(step, seconds, held-out accuracy) of every measurement, in order of the steps.

    seconds: from the beginning of the run to the update that made the measured weights, however long measuring took.
    """
    made = {line["step"]: line["seconds"] for line in updates(metrics)}
    found = [line for line in metrics if "eval_accuracy" in line]
    return sorted((line["step"], made.get(line["step"], 0.0), line["eval_accuracy"]) for line in found)


def updates(metrics: Metrics) -> Metrics:
    """The lines of consumed batches, without those that are measurements only."""
    return [line for line in metrics if "train_seconds" in line]
