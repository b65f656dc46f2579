"""Clotho's training runs as a contender: `python pipeline.py`, once per seed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import datetime

from bench.contenders.deferred_evaluation import EVALUATED, UPDATED
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from bench.fingerprint import ROOT
from bench.runs import Record, run_until, training_began

FLAGS = "CLOTHO_BENCH_FLAGS"
"""Environment variable with additional flags of this contender for all cases."""

NO_COLLAPSE_DETECTION = "--collapse-detection off"
"""Disables the measurement of policy movement per update, which the other trainers do not have."""

PROFILES = ROOT / "bench" / "training_profiles"
OPTIONS = {
    "updates": "--steps",
    "batch_size": "--learner.batch-size",
    "group_size": "--sampling.group-size",
    "learning_rate": "--learner.optimizer.learning-rate",
    "warmup_steps": "--learner.schedule.warmup-steps",
    "schedule": "--learner.schedule",
    "temperature": "--sampling.temperature",
    "asynchronous": "--async",
    "objective": "--learner.objective",
    "advantage": "--learner.objective.advantage",
    "curriculum": "--data.curriculum",
}
"""Flags for the settings of a case."""

MANY = 10**6


def arguments(case: Case, seed: int, more: Sequence[str]) -> list[str]:
    """The command line of one run. case: `profile`, of these benchmarks or shipped, `target`, and keys of `OPTIONS`."""
    flags = [word for key, flag in OPTIONS.items() if key in case for word in (flag, str(case[key]))]
    own = PROFILES / f"{case['profile']}.toml"
    return [
        "--profile",
        str(own) if own.exists() else case["profile"],
        "--seed",
        str(seed),
        "--monitor.display",
        "none",
        *flags,
        *more,
    ]


def summarise(record: Record, target: float | None) -> Metrics:
    """Seconds, number and accuracy of the first update whose weights reach the target, or of the last update."""
    steps = record.metrics
    began = training_began(steps)
    measured = {line["step"]: line["accuracy"] for line in record.log if line["event"] == EVALUATED}
    reached = [step for step, accuracy in measured.items() if target is not None and accuracy >= target]
    last = reached[0] if reached else steps[-1]["step"]
    seconds = next(line["time/run"] for line in steps if line["step"] == last) - began
    made = {line["step"]: datetime.fromisoformat(line["time"]) for line in record.log if line["event"] == UPDATED}
    found = {"seconds": seconds, "updates": float(last)}
    if last in made:
        found["from_command"] = made[last].timestamp() - record.launched
    if last in measured:
        found["accuracy"] = measured[last]
    return found


def prepare(case: Case) -> MeasureOnce:
    """Runs of the case, each with the next seed, starting at the seed of the case or 0.

    A run ends early after `limit_seconds` of training.
    """
    seeds = iter(range(case.get("seed", 0), MANY))
    more, limit = os.environ.get(FLAGS, "").split(), case.get("limit_seconds", math.inf)
    return lambda: summarise(run_until(arguments(case, next(seeds), more), seconds=limit), case.get("target"))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_train"], packages=["mlx", "mlx-lm"])
