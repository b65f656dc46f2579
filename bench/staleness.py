"""On Linux, Clotho's decode step is NumPy and BLAS (clotho/cpu); nothing here was measured on Metal.

Measures the held-out accuracy of objectives and corrections when every batch is some updates old.

    python -m bench staleness [--lags 0 4 16 32 64] [--methods grpo vcpo ...] [--seeds 0 1 2] [--profile learn-m3]

Every run is `python pipeline.py --profile PROFILE --async false --rollouts.lag LAG --seed SEED` with the flags of the
method, so that the age of a batch does not depend on the machine and the result is reproducible bit for bit. Runs whose
results are in bench/results/staleness.jsonl are not repeated; an interrupted benchmark continues where it ended. Flags
after `--` go to every run. `python -m bench figures` writes table and chart into docs/numerics.md.
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
from bench.measurement import Measurement
from bench.runs import Record, accuracies, run_pipeline
from bench.tables import markdown, spread, unique

NAME = "staleness"
RESULTS = ROOT / "bench" / "results" / "staleness.jsonl"
LAGS = (0, 4, 16, 32, 64)

BATCH_START = "--learner.objective grpo --learner.objective.ratio-reference batch_start"
CORRECTION = f"{BATCH_START} --learner.objective.importance-correction"
REINFORCE = "--learner.objective reinforce --learner.objective.importance-correction truncate_sequence"
WEIGHTED = f"{REINFORCE} --learner.objective.importance-correction.high 8"
STEP_SCALE = "--learner.step-scale ess"
METHODS = {
    "grpo, uncorrected": BATCH_START,
    "grpo": "--learner.objective grpo",
    "grpo, truncate": f"{CORRECTION} truncate",
    "grpo, mask": f"{CORRECTION} mask",
    "grpo, truncate_sequence": f"{CORRECTION} truncate_sequence",
    "grpo, reject_sequence": f"{CORRECTION} reject_sequence",
    "grpo, reject_geometric": f"{CORRECTION} reject_geometric",
    "cispo": "--learner.objective cispo",
    "dppo_tv": "--learner.objective dppo_tv",
    "grpo, step_scale": f"--learner.objective grpo {STEP_SCALE}",
    "grpo, max_rl": "--learner.objective grpo --learner.objective.advantage max_rl",
    "vcpo": f"{WEIGHTED} --learner.objective.advantage optimal_baseline {STEP_SCALE}",
    "vcpo without step_scale": f"{WEIGHTED} --learner.objective.advantage optimal_baseline",
    "vcpo without optimal_baseline": f"{WEIGHTED} --learner.objective.advantage group {STEP_SCALE}",
}
"""Flags of every method. `grpo` clips the ratio to the sampler; uncorrected, stale rollouts count as new ones."""

DRAWN = ("grpo, uncorrected", "grpo", "grpo, truncate", "vcpo")
"""Methods of the chart, of those that were measured."""


class StalenessRun(Struct, frozen=True, kw_only=True):
    """One run. lag: in updates. before, after: held-out accuracy; lowest: of all evaluations after the first.

    staleness: largest that a group had. ess, completion_ess, step_scale: medians over the updates. updates: applied.
    seconds: of the whole run. flags: further flags of every run.
    """

    profile: str
    method: str
    lag: int
    seed: int
    flags: str
    before: float
    after: float
    lowest: float
    updates: int
    staleness: int
    ess: float
    completion_ess: float
    step_scale: float
    seconds: float
    command: str
    fingerprint: Fingerprint

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        """What distinguishes two runs."""
        return self.profile, self.method, self.lag, self.seed, self.flags


def arguments(profile: str, method: str, lag: int, seed: int, flags: str) -> list[str]:
    """Return the command line of a run."""
    words = ["--profile", profile, "--async", "false", *METHODS[method].split(), "--seed", str(seed), *flags.split()]
    return [*words, "--rollouts.lag", str(lag)] if lag else words


def measure(profile: str, method: str, lag: int, seed: int, flags: str) -> StalenessRun:
    """Run once."""
    words = arguments(profile, method, lag, seed, flags)
    record = run_pipeline(words)
    return summarise(record, profile, method, lag, seed, flags, command="python pipeline.py " + " ".join(words))


def summarise(
    record: Record, profile: str, method: str, lag: int, seed: int, flags: str, *, command: str
) -> StalenessRun:
    """Read the result from the files of a run."""
    measured = [accuracy for _, _, accuracy in accuracies(record)]
    updates = [line for line in record.metrics if line["update_applied"]]

    def median(name: str) -> float:
        return statistics.median(line[name] for line in updates) if updates else 1.0

    return StalenessRun(
        profile=profile,
        method=method,
        lag=lag,
        seed=seed,
        flags=flags,
        before=measured[0],
        after=measured[-1],
        lowest=min(measured[1:]),
        updates=len(updates),
        staleness=max((line["staleness/max"] or 0 for line in record.metrics), default=0),
        ess=median("ess"),
        completion_ess=median("completion_ess"),
        step_scale=median("step_scale"),
        seconds=record.metrics[-1]["time/run"],
        command=command,
        fingerprint=fingerprint(),
    )


def read(path: Path = RESULTS) -> list[StalenessRun]:
    """Read all runs; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=StalenessRun) for line in path.read_bytes().splitlines()]


def table(runs: Sequence[StalenessRun]) -> str:
    """Format the accuracies as Markdown: one table per profile, one row per method and one column per lag."""
    parts = [_of_profile([run for run in runs if run.profile == name]) for name in unique(run.profile for run in runs)]
    seeds = sorted({run.seed for run in runs})
    note = (
        f"Held-out accuracy after training, {len(seeds)} seeds: median (lowest to highest). Below: effective sample "
        "size of completions, median over updates and seeds."
    )
    return "\n\n".join([*parts, f"{note} {describe_fingerprint(runs[0].fingerprint)}. `python -m bench {NAME}`"])


def _of_profile(runs: Sequence[StalenessRun]) -> str:
    lags = sorted({run.lag for run in runs})
    first = runs[0]
    heading = [f"`{first.profile}`, {first.before:.3f} before", *(f"lag {lag}" for lag in lags)]
    return markdown(heading, [[f"`{name}`", *_cells(runs, name, lags)] for name in METHODS if _of(runs, name)])


def _cells(runs: Sequence[StalenessRun], method: str, lags: Sequence[int]) -> list[str]:
    found = [[run for run in _of(runs, method) if run.lag == lag] for lag in lags]
    return [
        f"{spread([run.after for run in one], '')}<br>{statistics.median(run.completion_ess for run in one):.2f}"
        if one
        else ""
        for one in found
    ]


def _of(runs: Sequence[StalenessRun], method: str) -> list[StalenessRun]:
    return [run for run in runs if run.method == method]


def draw(runs: Sequence[StalenessRun], target: Path) -> None:
    """Draw accuracy against the lag, one line per method, for the first profile of the results."""
    from bench.charts import draw_lines

    drawn = [
        Measurement(
            question=NAME,
            case={"lag of the rollouts, updates": lag},
            contender=method,
            metric="held-out accuracy",
            unit="",
            better="higher",
            values=values,
            semantics="",
            versions={},
            command=f"python -m bench {NAME}",
            fingerprint=runs[0].fingerprint,
        )
        for method in DRAWN
        for lag in sorted({run.lag for run in runs})
        if (values := [r.after for r in _of(runs, method) if (r.lag, r.profile) == (lag, runs[0].profile)])
    ]
    draw_lines(drawn, "held-out accuracy", "lag of the rollouts, updates", target, title=f"profile {runs[0].profile}")


def main(argv: Sequence[str]) -> int:
    """Run what is not in the results yet, method by method within each lag and seed."""
    words, flags = list(argv), ""
    if "--" in words:
        at = words.index("--")
        words, flags = words[:at], " ".join(words[at + 1 :])
    parser = argparse.ArgumentParser(prog=f"python -m bench {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--profile", default="learn-m3")
    parser.add_argument("--lags", type=int, nargs="+", default=list(LAGS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(words)
    for seed in chosen.seeds:
        for lag in chosen.lags:
            for method in chosen.methods:
                if (chosen.profile, method, lag, seed, flags) in {run.key for run in read(chosen.out)}:
                    continue
                run = measure(chosen.profile, method, lag, seed, flags)
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                with chosen.out.open("ab") as file:
                    file.write(msgspec.json.encode(run) + b"\n")
                sys.stdout.write(describe(run) + "\n")
                sys.stdout.flush()
    return 0


def describe(run: StalenessRun) -> str:
    """One line about a run."""
    return (
        f"{run.method:30} lag {run.lag:2} seed {run.seed}: {run.before:.3f} -> {run.after:.3f} (lowest "
        f"{run.lowest:.3f}) in {run.seconds:.0f} s, {run.updates} updates, staleness {run.staleness}, ess "
        f"{run.ess:.2f} of the tokens and {run.completion_ess:.2f} of the completions, step scale {run.step_scale:.2f}"
    )
