"""Our runs, as a contender's program: `python pipeline.py` as a user starts it, once for every seed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime

from bench.contenders.loop import Case, Metrics, Once, serve
from bench.contenders.measured_afterwards import MADE, MEASURED
from bench.fingerprint import ROOT
from bench.runs import Record, run_pipeline, updates

FLAGS = "CLOTHO_BENCH_FLAGS"
"""Variable with more of the command line, of this contender in all cases."""

UNWATCHED = "--collapse-detection.on-collapse off"
"""Without looking at how far each update moves the policy, which others do not do either."""

PROFILES = ROOT / "bench" / "wall_clock_profiles"
SEMANTICS = (
    "Seconds from the first prompt to the update in question, of `python pipeline.py`; every version is kept and "
    "measured after the run, so no evaluation is in them. From the command: from the start of its process."
)
OPTIONS = {
    "updates": "--steps",
    "batch_size": "--learner.batch-size",
    "group_size": "--sampling.group-size",
    "learning_rate": "--learner.learning-rate",
    "warmup_steps": "--learner.warmup-steps",
    "schedule": "--learner.schedule",
    "temperature": "--sampling.temperature",
    "asynchronous": "--async",
}
"""Flags of those keys that a case may have."""

MANY = 10**6


def arguments(case: Case, seed: int, more: Sequence[str]) -> list[str]:
    """The command line of one run. case: `profile`, one of this question's; `target`; keys of `OPTIONS`."""
    flags = [word for key, flag in OPTIONS.items() if key in case for word in (flag, str(case[key]))]
    profile = str(PROFILES / f"{case['profile']}.toml")
    return ["--profile", profile, "--seed", str(seed), "--monitor.display", "none", *flags, *more]


def summarise(record: Record, target: float | None) -> Metrics:
    """Seconds, number and accuracy of the first update whose weights reach the target, or of the last one."""
    steps = updates(record.metrics)
    began = steps[0]["seconds"] - steps[0]["train_seconds"] - steps[0]["wait_seconds"]
    measured = {line["step"]: line["accuracy"] for line in record.log if line["event"] == MEASURED}
    reached = [step for step, accuracy in measured.items() if target is not None and accuracy >= target]
    last = reached[0] if reached else steps[-1]["step"]
    seconds = next(line["seconds"] for line in steps if line["step"] == last) - began
    made = {line["step"]: datetime.fromisoformat(line["time"]) for line in record.log if line["event"] == MADE}
    found = {"seconds": seconds, "updates": float(last)}
    if last in made:
        found["from_command"] = made[last].timestamp() - record.launched
    if last in measured:
        found["accuracy"] = measured[last]
    return found


def prepare(case: Case) -> Once:
    """Runs of the case; each has the next seed, from that of the case, or 0."""
    seeds = iter(range(case.get("seed", 0), MANY))
    more = os.environ.get(FLAGS, "").split()
    return lambda: summarise(run_pipeline(arguments(case, next(seeds), more)), case.get("target"))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
