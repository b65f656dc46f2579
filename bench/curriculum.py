"""On Linux, Clotho's decode step is NumPy and BLAS (clotho/cpu); nothing here was measured on Metal.

Counts the rollouts that a run needs to reach a held-out accuracy when half of its problems are useless: too hard, or
already solved. Problems are drawn uniformly, or by the curriculum by success rate.

    python -m bench curriculum [--profile learn-m3] [--seeds 0 1 2 3 4] [-- FLAG ...]

The base policy first samples every training problem of the profile 16 times. The problems of a run are then a quarter
that it always solved, a quarter that it never solved, and a half of the others; held-out problems are those of the
profile. Both ways of choosing use the same problems, the same settings and a constant learning rate, in synchronous
runs. Both replace zero-variance groups by other groups (dynamic sampling), so that updates have full batches: the size
of an update hardly depends on the number of its groups, and small batches would hide the cost of useless groups. Flags
behind `--` are passed to both. A rollout is one completion, whether its group is trained on or discarded. The number of
rollouts at the target is interpolated between the two evaluations around it. Runs end at the first evaluation that
reaches the target.
"""

from __future__ import annotations

import argparse
import json
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
from clotho.config.load import load_profile

NAME = "curriculum"
RESULTS = ROOT / "bench" / "results" / "curriculum.jsonl"
CURRICULA = ("uniform", "success_rate")
TARGET, STEPS, INTERVAL = 0.7, 600, 10
MAX_RATIO = 4
"""Limit of the groups of a batch, replaced groups included, relative to the batch size."""

SAMPLES = 16
"""Completions of the base policy per training problem."""

BAR = 0.6
"""Largest median of the rollouts of the curriculum relative to those of uniform sampling."""


class CurriculumRun(Struct, frozen=True, kw_only=True):
    """One run. accuracy: (rollouts, held-out accuracy) of every evaluation.

    rollouts: number at the target; None if the run did not reach it. zero_variance: share of the groups.
    load: mean number of busy processes of the machine in the last minute, at the end of the run.
    """

    profile: str
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


def success_rates(profile: str, samples: int) -> dict[str, float]:
    """Return the share of correct completions of the base policy by training prompt."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rates.json")
        options = ["--profile", profile, "--part", "train", "--samples", str(samples), "--output", str(path)]
        subprocess.run([sys.executable, "pipeline.py", "eval", *options], cwd=ROOT, check=True, stdout=sys.stderr)
        records = json.loads(path.read_bytes())["policies"]["base"]["records"]
    return {record["prompt"]: statistics.fmean(one["correct"] for one in record["samples"]) for record in records}


def mixture(problems: Sequence[dict[str, Any]], rates: Mapping[str, float], *, seed: int) -> list[dict[str, Any]]:
    """Return problems of which half are useless: equally many that are always and that are never solved.

    rates: success rate of each prompt. Raises ValueError if one of the three parts has no problem.
    """
    shuffled = random.Random(seed).sample(list(problems), len(problems))
    solved = [problem for problem in shuffled if rates[problem["prompt"]] == 1]
    hard = [problem for problem in shuffled if rates[problem["prompt"]] == 0]
    others = [problem for problem in shuffled if 0 < rates[problem["prompt"]] < 1]
    quarter = min(len(solved), len(hard), len(others) // 2)
    if not quarter:
        raise ValueError("the dataset must have solved problems, hard problems and others")
    return [*solved[:quarter], *hard[:quarter], *others[: 2 * quarter]]


def measure(
    profile: str, curriculum: str, seed: int, *, problems: Path, target: float, flags: Sequence[str]
) -> CurriculumRun:
    """Train until the target accuracy is reached, or to the end of the run."""
    arguments = [
        "--profile", profile, "--data.curriculum", curriculum, "--seed", str(seed), "--steps", str(STEPS),
        "--async", "false", "--learner.schedule", "constant", "--eval.interval", str(INTERVAL),
        "--learner.objective.dynamic-sampling-max-ratio", str(MAX_RATIO), "--checkpoint.interval", "0", *flags,
    ]  # fmt: skip
    heldout = load_profile(profile).data.heldout  # a flag for data.train clears it
    record = run_until([*arguments, "--data.train", str(problems), "--data.heldout", heldout], accuracy=target)
    curve = accuracy_by_rollouts(record)
    groups = sum(line["groups/trained"] + line["groups/discarded"] for line in record.metrics)
    equal = sum(line["groups/discarded_by_reason"].get("zero_variance", 0) for line in record.metrics)
    return CurriculumRun(
        profile=profile,
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
    """Return the rollouts of the curriculum relative to uniform sampling, by seed, if both reached the target."""
    found = {(run.curriculum, run.seed): run.rollouts for run in runs}
    pairs = {seed: (found.get((CURRICULA[1], seed)), found.get((CURRICULA[0], seed))) for _, seed in found}
    return {seed: ours / theirs for seed, (ours, theirs) in sorted(pairs.items()) if ours and theirs}


def table(runs: Sequence[CurriculumRun]) -> str:
    """Format the results as Markdown, one row per way of choosing."""
    seeds, first = sorted({run.seed for run in runs}), runs[0]
    head = ["data.curriculum", *(f"seed {seed}" for seed in seeds), "median", "zero-variance groups", "updates"]
    rows = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name in CURRICULA:
        own = {run.seed: run for run in runs if run.curriculum == name}
        if not own:
            continue
        cells = [_rollouts(own[seed].rollouts) if seed in own else "" for seed in seeds]
        reached = [run.rollouts if run.rollouts is not None else float("inf") for run in own.values()]
        middle = statistics.median(reached)
        share = statistics.median(run.zero_variance for run in own.values())
        updates = statistics.median(run.updates for run in own.values())
        last = [_rollouts(None if middle == float("inf") else middle), f"{share:.0%}", f"{updates:.0f}"]
        rows.append("| " + " | ".join([f"`{name}`", *cells, *last]) + " |")
    by_seed = ratios(runs)
    if by_seed:
        middle = statistics.median(by_seed.values())
        cells = [f"{by_seed[seed]:.2f}" if seed in by_seed else "" for seed in seeds]
        rows.append("| " + " | ".join(["ratio", *cells, f"**{middle:.2f}**", "", ""]) + " |")
    load = max(run.load for run in runs)
    return "\n".join([
        *rows,
        "",
        f"Rollouts until the held-out accuracy is {first.target:g}, profile `{first.profile}`; the other columns are "
        f"medians over the seeds. {describe_fingerprint(first.fingerprint)}, load at most {load:.1f}; the numbers of "
        "rollouts do not depend on the load. `python -m bench curriculum`",
    ])  # fmt: skip


def _rollouts(count: float | None) -> str:
    return "not reached" if count is None else f"{count:,.0f}"


def main(argv: Sequence[str]) -> int:
    """Run both ways of choosing with every seed. Returns 1 if the median ratio is above the bar."""
    parser = argparse.ArgumentParser(prog="python -m bench curriculum", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--profile", default="learn-m3", help="Profile whose dataset is mixed.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--curricula", nargs="+", choices=CURRICULA, default=list(CURRICULA))
    parser.add_argument("--target", type=float, default=TARGET, help="Held-out accuracy to reach.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Results file.")
    parser.add_argument("flags", nargs="*", help="Flags of every run, behind --.")
    chosen = parser.parse_args(argv)
    dataset = Path(load_profile(chosen.profile).data.train)
    problems = [json.loads(line) for line in dataset.read_text(encoding="utf-8").splitlines()]
    rates = success_rates(chosen.profile, SAMPLES)
    for seed in chosen.seeds:
        mixed = mixture(problems, rates, seed=seed)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "train.jsonl")
            path.write_text("".join(json.dumps(problem) + "\n" for problem in mixed), encoding="utf-8")
            for name in chosen.curricula:
                run = measure(chosen.profile, name, seed, problems=path, target=chosen.target, flags=chosen.flags)
                kept = [one for one in read(chosen.out) if (one.curriculum, one.seed) != (name, seed)]
                chosen.out.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in [*kept, run]))
                sys.stdout.write(f"{name:14} seed {seed}: {_rollouts(run.rollouts)} rollouts in {run.seconds:.0f} s\n")
                sys.stdout.flush()
    runs = read(chosen.out)
    sys.stdout.write(table(runs) + "\n")
    by_seed = ratios(runs)
    return 0 if by_seed and statistics.median(by_seed.values()) <= BAR else 1
