"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures whether collapse detection recognizes a destructive learning rate in time, and whether rollback saves the run.

    python -m bench collapse [--seeds 0] [--rates 2e-3 3e-3 5e-3]

All weights of the embedded policy are trained, at learning rates that are too high. Each rate is run twice: once with a
warning only and an evaluation after every update, which shows when the detection triggered and what was lost by then;
and once with rollback to the last healthy policy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint
from bench.runs import Record, accuracies, run_pipeline

NAME = "collapse"
RESULTS = ROOT / "bench" / "results" / "collapse.jsonl"
PROBLEMS = "128"
"""Held-out problems in the evaluation after every update."""

WARNING = "collapse_detected"
"""The log event of a triggered detection."""


class CollapseRun(Struct, frozen=True, kw_only=True):
    """One learning rate. tripped: the first update at which the detection triggered.

    at_alarm: first held-out accuracy measured at or after that update. best, lowest: of all evaluations before it, and
    after it. saved: final accuracy on all problems of the run with rollback. rollbacks: how often that run rolled back.
    """

    rate: float
    seed: int
    before: float
    tripped: int | None
    sign: str
    best: float
    at_alarm: float
    lowest: float
    final: float
    saved: float
    rollbacks: int
    commands: list[str]
    fingerprint: Fingerprint


def measure(rate: float, seed: int) -> CollapseRun:
    """Run once with a warning only and once with rollback."""
    common = ["--profile", "local-m3", "--policy.method", "full", "--learner.optimizer.learning-rate", str(rate)]
    common += ["--seed", str(seed)]
    watched = ["--steps", "30", "--eval.interval", "1", "--eval.problems-between", PROBLEMS]
    warned = run_pipeline([*common, *watched])
    rescue = [*common, "--collapse-detection", "rollback", "--eval.interval", "0"]
    saved = run_pipeline(rescue)
    tripped, sign = first_trip(warned)
    curve = [(step, accuracy) for step, _, accuracy in accuracies(warned)]
    end = tripped if tripped is not None else curve[-1][0]
    after = [accuracy for step, accuracy in curve if step >= end]
    return CollapseRun(
        rate=rate,
        seed=seed,
        before=curve[0][1],
        tripped=tripped,
        sign=sign,
        best=max(accuracy for step, accuracy in curve if step <= end),
        at_alarm=after[0],
        lowest=min(after),
        final=curve[-1][1],
        saved=accuracies(saved)[-1][2],
        rollbacks=sum(line["rolled_back"] for line in saved.metrics),
        commands=["python pipeline.py " + " ".join(flags) for flags in ([*common, *watched], rescue)],
        fingerprint=fingerprint(),
    )


def first_trip(run: Record) -> tuple[int | None, str]:
    """The first update at which the detection triggered, with its message; None if it never did."""
    for line in run.log:
        if line["event"] == WARNING:
            return line["step"], line["findings"]
    return None, ""


def read(path: Path = RESULTS) -> list[CollapseRun]:
    """Read all results; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=CollapseRun) for line in path.read_bytes().splitlines()]


def table(results: Sequence[CollapseRun]) -> str:
    """Format the results as Markdown."""
    head = ["learning rate", "seed", "detected after update", "accuracy then (best before)", "lowest, warning only"]
    head += ["final, warning only", "final, with rollback (rollbacks)"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for one in results:
        cells = [f"{one.rate:g}", str(one.seed), str(one.tripped or "none"), f"{one.at_alarm:.2f} ({one.best:.2f})"]
        cells += [f"{one.lowest:.2f}", f"{one.final:.2f}", f"{one.saved:.3f} ({one.rollbacks})"]
        rows.append("| " + " | ".join(cells) + " |")
    note = (
        f"All weights trained; accuracy {results[0].before:.2f} before. Runs with a warning only: 30 updates, "
        f"{PROBLEMS} held-out problems after each. Runs with rollback: 60 updates, all held-out problems."
    )
    machine = describe_fingerprint(results[0].fingerprint)
    return "\n".join([*rows, "", f"{note} {machine}. `python -m bench collapse`"])


def main(argv: Sequence[str]) -> int:
    """Measure every learning rate with every seed."""
    parser = argparse.ArgumentParser(prog="python -m bench collapse", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 3e-3, 5e-3])
    chosen = parser.parse_args(argv)
    results = [measure(rate, seed) for rate in chosen.rates for seed in chosen.seeds]
    RESULTS.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in results))
    sys.stdout.write(table(results) + "\n")
    return 0
