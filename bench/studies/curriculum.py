"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Counts the rollouts that a run of learn-m3 needs to reach a held-out accuracy when half of its problems are useless: too
hard, or already solved. Problems are drawn uniformly, or by the curriculum by success rate.

    python -m bench curriculum [--seeds 0 1 2 3 4]

The base policy first samples every training problem of the profile 16 times. The problems of a run are then a quarter
that it always solved, a quarter that is too hard, and a half of the others; held-out problems are those of the profile.

too long: too hard are products of numbers with seven digits. No completion within the token limit can solve them, so
that they stay useless for the whole run. The others are all problems that were not always solved.

never solved: too hard are problems of the profile without a success among the 16 samples. The policy learns to solve
many of them during the run. The others were solved sometimes.

Both ways of choosing use the same problems, the same settings and a constant learning rate, in synchronous runs. Both
replace zero-variance groups by other groups (dynamic sampling), so that updates have full batches: the size of an
update hardly depends on the number of its groups, and small batches would hide the cost of useless groups. A rollout is
one completion, whether its group is trained on or discarded. The number of rollouts at the target is interpolated
between the two evaluations around it. Runs end at the first evaluation that reaches the target.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.fingerprint import ROOT
from bench.studies.runner import Arm, Column, Point, Study, column, merged, run_study
from profiles.times_table_maker.problems import ROWS, long_multiplication
from training_run.profile.load import load_profile

NAME = "curriculum"
PROFILE = "learn-m3"
TOO_HARD = ("too long", "never solved")
DIGITS = 7
"""Digits of the numbers in problems that are too long: their work needs more than the 48 tokens of a completion."""

TARGET, SAMPLES = 0.7, 16
"""Held-out accuracy to reach, and completions of the base policy per training problem."""


@cache
def success_rates() -> Mapping[str, float]:
    """Return the share of correct completions of the base policy by training prompt."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rates.json")
        options = ["--profile", PROFILE, "--part", "train", "--samples", str(SAMPLES), "--output", str(path)]
        subprocess.run([sys.executable, "pipeline.py", "eval", *options], cwd=ROOT, check=True, stdout=sys.stderr)
        records = json.loads(path.read_bytes())["policies"]["base"]["records"]
    return {record["prompt"]: statistics.fmean(one["correct"] for one in record["samples"]) for record in records}


def long_problems(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return problems with more digits than the token limit of the profile permits."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        number, row = chance.randrange(10 ** (DIGITS - 1), 10**DIGITS), chance.choice(ROWS)
        _, answer = long_multiplication(number, row)
        found.append({"prompt": f"What is {number} * {row}?", "answer": answer, "type": "seven digits"})
    return found


def mixture(
    problems: Sequence[dict[str, Any]], rates: Mapping[str, float], *, too_hard: str, seed: int
) -> list[dict[str, Any]]:
    """Return problems of which half are useless: equally many that are always solved and that are too hard.

    rates: success rate of each prompt. too_hard: see `TOO_HARD`. Raises ValueError if one of the three parts has no
    problem.
    """
    shuffled = random.Random(seed).sample(list(problems), len(problems))
    solved = [problem for problem in shuffled if rates[problem["prompt"]] == 1]
    unsolved = [problem for problem in shuffled if rates[problem["prompt"]] == 0]
    others = [problem for problem in shuffled if 0 < rates[problem["prompt"]] < 1]
    if too_hard == "too long":
        others, hard = sorted(others + unsolved, key=shuffled.index), long_problems(len(solved), seed=seed)
    else:
        hard = unsolved
    quarter = min(len(solved), len(hard), len(others) // 2)
    if not quarter:
        raise ValueError("the dataset must have solved problems, hard problems and others")
    return [*solved[:quarter], *hard[:quarter], *others[: 2 * quarter]]


def problems_of(arm: Arm, seed: int, scratch: Path) -> tuple[str, ...]:
    """The flags with the problems of a run, in a file, and with the held-out problems of the profile."""
    data = load_profile(PROFILE).data
    problems = [json.loads(line) for line in Path(data.train).read_text(encoding="utf-8").splitlines()]
    mixed = mixture(problems, success_rates(), too_hard=arm.data, seed=seed)
    path = scratch / "train.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in mixed), encoding="utf-8")
    return "--data.train", str(path), "--data.heldout", data.heldout


def rollouts_at(curve: Sequence[Point], target: float) -> float | None:
    """Return the number of rollouts at which the accuracy first reaches the target; None if it never does.

    Linear between two evaluations; that of the first evaluation if it is above the target.
    """
    before: Point | None = None
    for point in curve:
        if point.accuracy >= target:
            if before is None:
                return float(point.rollouts)
            part = (target - before.accuracy) / (point.accuracy - before.accuracy)
            return before.rollouts + (point.rollouts - before.rollouts) * part
        before = point
    return None


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=tuple(
        Arm(
            name=f"{curriculum}, {family}",
            flags=("--data.curriculum", curriculum),
            data=family,
            family=f"too hard: {family}",
            reference=f"uniform, {family}",
        )
        for family in TOO_HARD
        for curriculum in ("uniform", "success_rate")
    ),
    flags=merged(
        f"--profile {PROFILE} --steps 600 --async false --learner.schedule constant --eval.interval 10",
        "--learner.objective.dynamic-sampling-max-ratio 4 --learner.max-equal-batches 0 --checkpoint.interval 0",
    ),
    target=TARGET,
    prepare=problems_of,
    columns=(
        Column(
            title=f"rollouts to {TARGET:g}",
            value=lambda trial: rollouts_at(trial.curve, TARGET),
            missing="never",
            compare="ratio",
        ),
        column("zero-variance groups", "zero_variance"),
        column("updates", "updates"),
    ),
    note=(
        f"Rollouts until the held-out accuracy is {TARGET:g}, profile `{PROFILE}`; medians over the seeds, with lowest "
        "and highest. The numbers of rollouts do not depend on the load of the machine."
    ),
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
