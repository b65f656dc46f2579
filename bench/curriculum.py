"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Counts the rollouts that a run of learn-m3 needs to reach a held-out accuracy when half of its problems are useless: too
hard, or already solved. Problems are drawn uniformly, or by the curriculum by success rate.

    python -m bench curriculum [--too-hard "too long" "never solved"] [--seeds 0 1 2 3 4] [-- FLAG ...]

The base policy first samples every training problem of the profile 16 times. The problems of a run are then a quarter
that it always solved, a quarter that is too hard, and a half of the others; held-out problems are those of the profile.
There are two kinds of too hard problems.

too long: products of numbers with seven digits. No completion within the token limit can solve them, so that they stay
useless for the whole run. The others are all problems that were not always solved.

never solved: problems of the profile without a success among the 16 samples. The policy learns to solve many of them
during the run, so that they are only useless at the start. The others were solved sometimes.

Both ways of choosing use the same problems, the same settings and a constant learning rate, in synchronous runs. Both
replace zero-variance groups by other groups (dynamic sampling), so that updates have full batches: the size of an
update hardly depends on the number of its groups, and small batches would hide the cost of useless groups. Flags behind
`--` are passed to both. A rollout is one completion, whether its group is trained on or discarded. The number of
rollouts at the target is interpolated between the two evaluations around it. Runs end at the first evaluation that
reaches the target.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint
from bench.runs import Record, run_until
from bench.tables import markdown
from profiles.times_table_maker.problems import ROWS, long_multiplication
from training_run.profile.load import load_profile

NAME = "curriculum"
COMMAND = "python -m bench curriculum"
PROFILE = "learn-m3"
RESULTS = ROOT / "bench" / "results" / "curriculum.jsonl"
CURRICULA = ("uniform", "success_rate")
TOO_HARD = ("too long", "never solved")
DIGITS = 7
"""Digits of the numbers in problems that are too long: their work needs more than the 48 tokens of a completion."""
TARGET, STEPS, INTERVAL = 0.7, 600, 10
MAX_RATIO = 4
"""Limit of the groups of a batch, replaced groups included, relative to the batch size."""

SAMPLES = 16
"""Completions of the base policy per training problem."""

BAR = 0.6
"""Largest median of the rollouts of the curriculum relative to those of uniform sampling."""


class CurriculumRun(Struct, frozen=True, kw_only=True):
    """One run. too_hard: kind of the useless problems that are not solved. accuracy: (rollouts, held-out accuracy).

    rollouts: number at the target; None if the run did not reach it. zero_variance: share of the groups.
    load: mean number of busy processes of the machine in the last minute, at the end of the run.
    """

    too_hard: str
    curriculum: str
    seed: int
    target: float
    rollouts: float | None
    zero_variance: float
    updates: int
    seconds: float
    accuracy: tuple[tuple[int, float], ...]
    load: float
    command: str
    fingerprint: Fingerprint


def success_rates(samples: int) -> dict[str, float]:
    """Return the share of correct completions of the base policy by training prompt."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rates.json")
        options = ["--profile", PROFILE, "--part", "train", "--samples", str(samples), "--output", str(path)]
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


def measure(
    too_hard: str, curriculum: str, seed: int, *, problems: Path, target: float, flags: Sequence[str]
) -> CurriculumRun:
    """Train until the target accuracy is reached, or to the end of the run."""
    arguments = [
        "--profile", PROFILE, "--data.curriculum", curriculum, "--seed", str(seed), "--steps", str(STEPS),
        "--async", "false", "--learner.schedule", "constant", "--eval.interval", str(INTERVAL),
        "--learner.objective.dynamic-sampling-max-ratio", str(MAX_RATIO), "--checkpoint.interval", "0",
        "--learner.max-equal-batches", "0", *flags,
    ]  # fmt: skip
    heldout = load_profile(PROFILE).data.heldout  # a flag for data.train clears it
    record = run_until([*arguments, "--data.train", str(problems), "--data.heldout", heldout], accuracy=target)
    curve = accuracy_by_rollouts(record)
    groups = sum(line["groups/trained"] + line["groups/discarded"] for line in record.metrics)
    equal = sum(line["groups/discarded_by_reason"].get("zero_variance", 0) for line in record.metrics)
    return CurriculumRun(
        too_hard=too_hard,
        curriculum=curriculum,
        seed=seed,
        target=target,
        rollouts=rollouts_at(curve, target),
        zero_variance=equal / groups,
        updates=record.metrics[-1]["policy_version"],
        seconds=record.metrics[-1]["time/run"],
        accuracy=curve,
        load=os.getloadavg()[0],
        command="python pipeline.py " + " ".join(arguments),
        fingerprint=fingerprint(),
    )


def accuracy_by_rollouts(record: Record) -> tuple[tuple[int, float], ...]:
    """Return the number of completions before each evaluation, and its accuracy, in order of the steps."""
    size, total, after = record.profile["sampling"]["group_size"], 0, {0: 0}
    for line in record.metrics:
        total += size * (line["groups/trained"] + line["groups/discarded"])
        after[line["step"]] = total
    measured = [line for line in record.evaluations if line["step"] in after and line["accuracy"] is not None]
    return tuple((after[line["step"]], line["accuracy"]) for line in measured)


def rollouts_at(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return the number of rollouts at which the accuracy first reaches the target; None if it never does.

    Linear between two evaluations; that of the first evaluation if it is above the target.
    """
    before: tuple[int, float] | None = None
    for rollouts, accuracy in curve:
        if accuracy >= target:
            if before is None:
                return float(rollouts)
            return before[0] + (rollouts - before[0]) * (target - before[1]) / (accuracy - before[1])
        before = rollouts, accuracy
    return None


def read(path: Path = RESULTS) -> list[CurriculumRun]:
    """Read all runs; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=CurriculumRun) for line in path.read_bytes().splitlines()]


def ratios(runs: Sequence[CurriculumRun]) -> dict[int, float]:
    """Return the rollouts of the curriculum relative to uniform sampling, by seed, if one of both reached the target.

    A run that did not reach it needs infinitely many rollouts.
    """
    needed = {(run.curriculum, run.seed): math.inf if run.rollouts is None else run.rollouts for run in runs}
    uniform, ours = ({seed: one for (name, seed), one in needed.items() if name == chosen} for chosen in CURRICULA)
    pairs = {seed: (ours[seed], uniform[seed]) for seed in sorted(ours.keys() & uniform.keys())}
    return {seed: one / other for seed, (one, other) in pairs.items() if not (math.isinf(one) and math.isinf(other))}


def table(runs: Sequence[CurriculumRun]) -> str:
    """Format the results as Markdown: for each kind of too hard problems, one row per way of choosing."""
    seeds, first = sorted({run.seed for run in runs}), runs[0]
    head = ["too hard", "`data.curriculum`", *(f"seed {seed}" for seed in seeds)]
    rows = [[*head, "median", "zero-variance groups", "updates"]]
    for too_hard in TOO_HARD:
        mine = [run for run in runs if run.too_hard == too_hard]
        rows += [_row(name, seeds, own) for name in CURRICULA if (own := [r for r in mine if r.curriculum == name])]
        if by_seed := ratios(mine):
            cells = [_ratio(by_seed[seed]) if seed in by_seed else "" for seed in seeds]
            rows.append([too_hard, "ratio", *cells, f"**{_ratio(statistics.median(by_seed.values()))}**", "", ""])
    load = max(run.load for run in runs)
    return "\n".join([
        markdown(rows[0], rows[1:]),
        "",
        f"Rollouts until the held-out accuracy is {first.target:g}, profile `{PROFILE}`; the other columns are "
        f"medians over the seeds. {describe_fingerprint(first.fingerprint)}, load at most {load:.1f}; the numbers of "
        f"rollouts do not depend on the load. `{COMMAND}`",
    ])  # fmt: skip


def _row(name: str, seeds: Sequence[int], runs: Sequence[CurriculumRun]) -> list[str]:
    own = {run.seed: run for run in runs}
    middle = statistics.median(math.inf if run.rollouts is None else run.rollouts for run in runs)
    return [
        runs[0].too_hard,
        f"`{name}`",
        *(_rollouts(own[seed].rollouts) if seed in own else "" for seed in seeds),
        _rollouts(None if math.isinf(middle) else middle),
        f"{statistics.median(run.zero_variance for run in runs):.0%}",
        f"{statistics.median(run.updates for run in runs):.0f}",
    ]


def _ratio(value: float) -> str:
    return "not reached" if math.isinf(value) else f"{value:.2f}"


def _rollouts(count: float | None) -> str:
    return "not reached" if count is None else f"{count:,.0f}"


def main(argv: Sequence[str]) -> int:
    """Run both ways of choosing with every seed. Returns 1 if a median ratio is above the bar."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--too-hard", nargs="+", choices=TOO_HARD, default=list(TOO_HARD), metavar="KIND")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--curricula", nargs="+", choices=CURRICULA, default=list(CURRICULA))
    parser.add_argument("--target", type=float, default=TARGET, help="Held-out accuracy to reach.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Results file.")
    parser.add_argument("flags", nargs="*", help="Flags of every run, behind --.")
    chosen = parser.parse_args(argv)
    dataset = Path(load_profile(PROFILE).data.train)
    problems = [json.loads(line) for line in dataset.read_text(encoding="utf-8").splitlines()]
    rates = success_rates(SAMPLES)
    for seed, too_hard in itertools.product(chosen.seeds, chosen.too_hard):
        mixed = mixture(problems, rates, too_hard=too_hard, seed=seed)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "train.jsonl")
            path.write_text("".join(json.dumps(problem) + "\n" for problem in mixed), encoding="utf-8")
            for name in chosen.curricula:
                run = measure(too_hard, name, seed, problems=path, target=chosen.target, flags=chosen.flags)
                store(run, chosen.out)
                count = _rollouts(run.rollouts)
                sys.stdout.write(f"{too_hard:14} {name:14} seed {seed}: {count} rollouts in {run.seconds:.0f} s\n")
                sys.stdout.flush()
    runs = read(chosen.out)
    sys.stdout.write(table(runs) + "\n")
    found = [ratios([run for run in runs if run.too_hard == too_hard]) for too_hard in chosen.too_hard]
    return 0 if all(one and statistics.median(one.values()) <= BAR for one in found) else 1


def store(run: CurriculumRun, path: Path) -> None:
    """Add a run to a results file; it replaces one of the same kind, way of choosing and seed."""
    key = (run.too_hard, run.curriculum, run.seed)
    kept = [one for one in read(path) if (one.too_hard, one.curriculum, one.seed) != key]
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in [*kept, run]))
