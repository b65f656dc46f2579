"""On Linux, Clotho's decode step is NumPy and BLAS (clotho/cpu); nothing here was measured on Metal.

Measures the held-out accuracy that each objective, with its default settings, reaches on the default task.

    python -m bench objectives [--seeds 0 1 2] [--objectives grpo dapo ...]

Every run is `python pipeline.py --profile local-m3 --learner.objective NAME --seed S`. New runs replace those of the
same objective and seed in bench/results/objectives.jsonl. `python -m bench figures` writes the table into
docs/numerics.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint
from bench.runs import Record, accuracies, run_pipeline
from clotho.config.keys import CHOICES

NAME = "objectives"
OBJECTIVES = tuple(name for name in CHOICES["learner.objective.type"] if name != "custom")
RESULTS = ROOT / "bench" / "results" / "objectives.jsonl"


class ObjectiveRun(Struct, frozen=True, kw_only=True):
    """One run. updates: policy updates applied. groups: trained on. seconds: of training."""

    objective: str
    seed: int
    before: float
    after: float
    updates: int
    groups: int
    discarded: int
    seconds: float
    command: str
    fingerprint: Fingerprint


def measure(objective: str, seed: int) -> ObjectiveRun:
    """Run the default profile once with another objective."""
    arguments = ["--profile", "local-m3", "--learner.objective", objective, "--seed", str(seed), "--eval.interval", "0"]
    return summarise(objective, seed, run_pipeline(arguments), "python pipeline.py " + " ".join(arguments))


def summarise(objective: str, seed: int, record: Record, command: str) -> ObjectiveRun:
    """Read the result from a run's metrics."""
    steps, measured = record.metrics, accuracies(record)
    first, last = steps[0], steps[-1]
    return ObjectiveRun(
        objective=objective,
        seed=seed,
        before=measured[0][2],
        after=measured[-1][2],
        updates=last["policy_version"],
        groups=sum(line["groups/trained"] for line in steps),
        discarded=sum(line["groups/discarded"] for line in steps),
        seconds=last["time/run"] - (first["time/run"] - first["time/update"] - first["time/wait_for_rollouts"]),
        command=command,
        fingerprint=fingerprint(),
    )


def read(path: Path = RESULTS) -> list[ObjectiveRun]:
    """Read all runs; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=ObjectiveRun) for line in path.read_bytes().splitlines()]


def table(outcomes: Sequence[ObjectiveRun]) -> str:
    """Format the results as Markdown, one row per objective."""
    seeds = sorted({outcome.seed for outcome in outcomes})
    head = ["objective", *(f"seed {seed}" for seed in seeds), "updates", "groups trained", "discarded", "seconds"]
    rows = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name in OBJECTIVES:
        runs = sorted((o for o in outcomes if o.objective == name), key=lambda outcome: outcome.seed)
        if not runs:
            continue
        accuracy = {run.seed: f"{run.after:.3f}" for run in runs}
        middle = [
            f"{statistics.median(numbers):,.0f}"
            for numbers in (
                [run.updates for run in runs],
                [run.groups for run in runs],
                [run.discarded for run in runs],
                [run.seconds for run in runs],
            )
        ]
        rows.append("| " + " | ".join([f"`{name}`", *(accuracy.get(seed, "") for seed in seeds), *middle]) + " |")
    first = outcomes[0]
    note = (
        f"Held-out accuracy after training ({first.before:.3f} before); the other columns are medians over the seeds."
    )
    return "\n".join([*rows, "", f"{note} {describe_fingerprint(first.fingerprint)}. `python -m bench objectives`"])


def main(argv: Sequence[str]) -> int:
    """Run every objective with every seed."""
    parser = argparse.ArgumentParser(prog="python -m bench objectives", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES))
    chosen = parser.parse_args(argv)
    for seed in chosen.seeds:
        for objective in chosen.objectives:
            outcome = measure(objective, seed)
            kept = [o for o in read() if (o.objective, o.seed) != (objective, seed)]
            RESULTS.write_bytes(b"".join(msgspec.json.encode(o) + b"\n" for o in [*kept, outcome]))
            sys.stdout.write(f"{objective:20} seed {seed}: {outcome.before:.3f} -> {outcome.after:.3f} ")
            sys.stdout.write(f"in {outcome.seconds:.1f} s, {outcome.updates} updates, {outcome.groups} groups\n")
            sys.stdout.flush()
    return 0
