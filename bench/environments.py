"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures training with Atropos environments: single-turn, multi-turn, and two environments of different weight.

    python -m bench environments [--python .atropos/bin/python] [--seeds 0 1]

Each run is `python pipeline.py --profile PROFILE --seed S` with the API server and the environments of atroposlib, in
an interpreter that has atroposlib installed (docs/atropos.md).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint
from bench.runs import Metrics, accuracies, run_pipeline

NAME = "environments"
RESULTS = ROOT / "bench" / "results" / "environments.jsonl"
PROFILES = ("atropos-local", "atropos-guessing", "atropos-two")
SHUFFLES = 20_000


class EnvironmentRun(Struct, frozen=True, kw_only=True):
    """One run with environments.

    before, after: held-out accuracy, if measured. seconds: from the start of the run to its last metrics line. rewards:
    mean reward of each update. p_value: of the hypothesis that the last third of them is no better than the first.
    groups: per environment, trained on or discarded with a batch. logprob_error: the largest difference, in nats.
    """

    profile: str
    seed: int
    updates: int
    before: float | None
    after: float | None
    seconds: float
    rewards: list[float]
    p_value: float
    groups: dict[str, int]
    weights: dict[str, float]
    logprob_error: float
    command: str
    fingerprint: Fingerprint


def measure(profile: str, seed: int, python: str) -> EnvironmentRun:
    """Run one profile."""
    arguments = ["--profile", profile, "--seed", str(seed)]
    record = run_pipeline([*arguments, "--atropos.python", python])
    steps, measured = record.metrics, [accuracy for _, _, accuracy in accuracies(record)]
    rewards = [line["reward/mean"] for line in steps if line["reward/mean"] is not None]
    third = len(rewards) // 3
    return EnvironmentRun(
        profile=profile,
        seed=seed,
        updates=steps[-1]["step"],
        before=measured[0] if measured else None,
        after=measured[-1] if measured else None,
        seconds=max(line["time/run"] for line in record.metrics),
        rewards=rewards,
        p_value=permutation_test(rewards[:third], rewards[-third:]),
        groups=groups(steps),
        weights={environment["name"]: environment.get("weight", 1.0) for environment in record.profile["environments"]},
        logprob_error=max(_errors(steps), default=0.0),
        command="python pipeline.py " + " ".join(arguments),
        fingerprint=fingerprint(),
    )


def groups(steps: Metrics) -> dict[str, int]:
    """Groups of each environment that were trained on or discarded with a batch."""
    total: dict[str, int] = {}
    for line in steps:
        for name, numbers in line["environments"].items():
            total[name] = total.get(name, 0) + numbers["groups/trained"] + numbers["groups/discarded"]
    return total


def _errors(steps: Metrics) -> list[float]:
    found = [numbers["logprob_error_max"] for line in steps for numbers in line["environments"].values()]
    return [error for error in found if error is not None]


def permutation_test(early: Sequence[float], late: Sequence[float], *, seed: int = 0) -> float:
    """One-sided permutation test: the fraction of random splits whose difference of means is at least late - early.

    Fisher's exact test by Monte Carlo. The observed split counts as one of the samples, so the result is never 0.
    """
    values, size = np.array([*early, *late]), len(late)
    found = np.mean(late) - np.mean(early)
    shuffled = np.random.default_rng(seed).permuted(np.tile(values, (SHUFFLES, 1)), axis=1)
    differences = shuffled[:, :size].mean(axis=1) - shuffled[:, size:].mean(axis=1)
    return float((1 + np.sum(differences >= found - 1e-12)) / (1 + SHUFFLES))


def read(path: Path = RESULTS) -> list[EnvironmentRun]:
    """Read all results; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=EnvironmentRun) for line in path.read_bytes().splitlines()]


def table(results: Sequence[EnvironmentRun]) -> str:
    """Format the results as Markdown."""
    head = [
        "profile",
        "seed",
        "held-out accuracy",
        "mean reward, first third of the updates",
        "last third",
        "p",
        "groups",
    ]
    rows = ["| " + " | ".join([*head, "seconds"]) + " |", "|---|" + "---:|" * len(head)]
    for one in results:
        third = len(one.rewards) // 3
        accuracy = "-" if one.before is None or one.after is None else f"{one.before:.3f} to {one.after:.3f}"
        means = [f"{statistics.fmean(part):.3f}" for part in (one.rewards[:third], one.rewards[-third:])]
        came = ", ".join(f"{name} {count}" for name, count in one.groups.items())
        cells = [one.profile, str(one.seed), accuracy, *means, f"{one.p_value:.1g}", came, f"{one.seconds:.0f}"]
        rows.append("| " + " | ".join(cells) + " |")
    note = (
        f"{results[0].updates} updates each. p: one-sided permutation test of the hypothesis that the last third is no "
        f"better than the first. The log-probabilities that environments returned differ by at most "
        f"{max(one.logprob_error for one in results):.1g} nats from the sampled ones."
    )
    return "\n".join([*rows, "", f"{note} {describe_fingerprint(results[0].fingerprint)}. `python -m bench {NAME}`"])


def main(argv: Sequence[str]) -> int:
    """Run every profile with every seed; other results of the file are kept."""
    parser = argparse.ArgumentParser(prog="python -m bench environments", description=__doc__)
    parser.add_argument("--python", default=".atropos/bin/python")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    chosen = parser.parse_args(argv)
    python = str(Path(chosen.python).absolute())
    results = [measure(profile, seed, python) for profile in chosen.profiles for seed in chosen.seeds]
    again = {(one.profile, one.seed) for one in results}
    results += [one for one in read() if (one.profile, one.seed) not in again]
    results.sort(key=lambda one: (PROFILES.index(one.profile), one.seed))
    RESULTS.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in results))
    sys.stdout.write(table(results) + "\n")
    return 0
