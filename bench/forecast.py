"""Measures how far the forecast of a run's end is from its actual end.

    python -m bench forecast [--seeds 0 1 2 3 4]

Runs `local-m3` once per seed, and repeats the forecast of its display from metrics.jsonl and evaluations.jsonl after
some of its steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint
from bench.runs import Record, run_pipeline
from training_run.profile.load import load_profile
from training_run.profile.schema import HeldOutEvaluation
from training_run.records.forecast import EvaluationTime, RemainingWork, seconds_left, step_time

NAME = "forecast"
RESULTS = ROOT / "bench" / "results" / "forecast.jsonl"
STEPS = (2, 5, 10, 20, 40)
"""Numbers of steps after which the forecast is compared."""


class ForecastRun(Struct, frozen=True, kw_only=True):
    """One run. seconds: its actual duration. errors: of the forecasts, as a fraction of it, by number of steps."""

    seed: int
    seconds: float
    errors: dict[int, float]
    command: str
    fingerprint: Fingerprint


def measure(seed: int) -> ForecastRun:
    """Run once."""
    flags = ["--profile", "local-m3", "--seed", str(seed), "--monitor.display", "none"]
    record = run_pipeline(flags)
    return ForecastRun(
        seed=seed,
        seconds=duration(record),
        errors=errors(record),
        command="python pipeline.py " + " ".join(flags),
        fingerprint=fingerprint(),
    )


def duration(record: Record) -> float:
    """Return the age of a run at its last line."""
    return max(float(line["time/run"]) for line in (*record.metrics, *record.evaluations))


def errors(record: Record) -> dict[int, float]:
    """Return (forecast - actual) / actual of the end of a run, by number of steps."""
    profile = load_profile("local-m3")
    assert isinstance(profile.eval, HeldOutEvaluation)
    plan = RemainingWork(
        steps=len(record.metrics),
        evaluates=True,
        interval=profile.eval.interval,
        between=profile.eval.problems_between,
    )
    first = record.evaluations[0]
    evaluated = EvaluationTime(problems=first["problems"], seconds=first["time/evaluation"])
    steps, end = [step_time(line) for line in record.metrics], duration(record)
    found = {}
    for done in STEPS:
        if done < len(steps):
            left = seconds_left(plan, done, steps[:done], evaluated)
            assert left is not None
            found[done] = (steps[done - 1].end + left - end) / end
    return found


def read(path: Path = RESULTS) -> list[ForecastRun]:
    """Read all results; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=ForecastRun) for line in path.read_bytes().splitlines()]


def table(results: Sequence[ForecastRun]) -> str:
    """Format the results as Markdown."""
    head = ["seed", "seconds", *(f"error after {done} steps" for done in STEPS)]
    rows = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for one in results:
        cells = [f"{one.errors[done]:+.0%}" if done in one.errors else "-" for done in STEPS]
        rows.append("| " + " | ".join([str(one.seed), f"{one.seconds:.1f}", *cells]) + " |")
    machine = describe_fingerprint(results[0].fingerprint)
    return "\n".join([*rows, "", f"Forecast of the end of `local-m3`. {machine}. `python -m bench forecast`"])


def main(argv: Sequence[str]) -> int:
    """Run every seed."""
    parser = argparse.ArgumentParser(prog="python -m bench forecast", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    results = [measure(seed) for seed in chosen.seeds]
    chosen.out.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in results))
    sys.stdout.write(table(results) + "\n")
    return 0
