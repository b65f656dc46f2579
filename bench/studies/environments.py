"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures training with Atropos environments: single-turn, multi-turn, and two environments of different weight.

    python -m bench environments [--seeds 0 1]

Each run is `python pipeline.py --profile PROFILE --seed S` with the API server and the environments of atroposlib. The
variable CLOTHO_ATROPOS_PYTHON names an interpreter that has atroposlib installed (docs/atropos.md); it is
.atropos/bin/python without the variable.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.fingerprint import ROOT
from bench.runs import Record
from bench.studies.runner import Arm, Study, column, run_study

NAME = "environments"
SHUFFLES = 20_000


def python(*_: object) -> tuple[str, str]:
    """The flag with the interpreter of the environments."""
    path = Path(os.environ.get("CLOTHO_ATROPOS_PYTHON", ROOT / ".atropos" / "bin" / "python"))
    return "--atropos.python", str(path.absolute())


def environment_values(record: Record) -> dict[str, float]:
    """Mean rewards of the first and of the last third of the updates, one at least; groups of environments, errors.

    p: of the hypothesis that the last third is no better than the first. logprob_error: largest difference, in nats.
    """
    rewards = [line["reward/mean"] for line in record.metrics if line["reward/mean"] is not None]
    third = max(1, len(rewards) // 3)
    early, late = rewards[:third], rewards[-third:]
    numbers = [(name, found) for line in record.metrics for name, found in line["environments"].items()]
    groups = dict.fromkeys((f"groups of {name}" for name, _ in numbers), 0.0)
    for name, found in numbers:
        groups[f"groups of {name}"] += found["groups/trained"] + found["groups/discarded"]
    errors = [error for _, found in numbers if (error := found["logprob_error_max"]) is not None]
    tested = {"early": statistics.fmean(early), "late": statistics.fmean(late), "p": permutation_test(early, late)}
    return tested | groups | {"logprob_error": max(errors, default=0.0)}


def permutation_test(early: Sequence[float], late: Sequence[float], *, seed: int = 0) -> float:
    """One-sided permutation test: the fraction of random splits whose difference of means is at least late - early.

    Fisher's exact test by Monte Carlo. The observed split counts as one of the samples, so the result is never 0.
    """
    values, size = np.array([*early, *late]), len(late)
    found = np.mean(late) - np.mean(early)
    shuffled = np.random.default_rng(seed).permuted(np.tile(values, (SHUFFLES, 1)), axis=1)
    differences = shuffled[:, :size].mean(axis=1) - shuffled[:, size:].mean(axis=1)
    return float((1 + np.sum(differences >= found - 1e-12)) / (1 + SHUFFLES))


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=tuple(
        Arm(name=name, flags=("--profile", name)) for name in ("atropos-local", "atropos-guessing", "atropos-two")
    ),
    seeds=(0, 1),
    measure=environment_values,
    prepare=python,
    columns=(
        column("accuracy before", "before"),
        column("accuracy after", "after"),
        column("reward, first third", "early"),
        column("reward, last third", "late"),
        column("p", "p"),
        column("groups of arithmetic", "groups of arithmetic"),
        column("groups of guessing", "groups of guessing"),
        column("difference of log-probabilities", "logprob_error"),
        column("seconds of training", "seconds", "s"),
    ),
    note=(
        "60 updates each; medians over the seeds, with lowest and highest. Rewards: means of the first and of the last "
        "third of the updates. p: one-sided permutation test of the hypothesis that the last third is no better than "
        "the first. Difference: the largest one, in nats, between the log-probabilities that environments returned and "
        "the sampled ones."
    ),
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
