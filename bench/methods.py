"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the accuracy that objectives, corrections, ranks and deliberately bad settings reach on a task to be learned.

    python -m bench methods [--methods NAME ...] [--seeds 0 1 2 3 4] [--parallel 2] [--list] [--quick]

bench/methods.toml defines the methods as flags of pipeline.py. Every run is `python pipeline.py --profile learn-m3
FLAGS --seed S`. Each run is added to bench/results/methods.jsonl when it ends. A run with the same flags and seed is
not repeated, so a measurement that was stopped continues where it stopped (bench/trials.py says when runs of other
sources count). `--list` shows the missing runs and the time that they will take. `python -m bench figures` writes the
tables into docs/numerics-internals.md.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT, describe_fingerprint
from bench.measurement import results_path
from bench.tables import markdown, number, scale_of, unique
from bench.trials import Accuracies, Method, Outcome, TrialBenchmark, merged, run_trial_benchmark
from training_run.profile.keys import SECTIONS

NAME = "methods"
COMMAND = "python -m bench methods"
TARGET = 0.7
"""The tables have the updates and the completions until this accuracy."""

AFTER: Callable[[Outcome], Accuracies] = attrgetter("after")
MEASURES: dict[str, Callable[[Outcome], Accuracies]] = {
    "after training": AFTER,
    "averaged over the run": attrgetter("average"),
}

SAMPLES = "8"
"""k of the pass@k in the tables of methods that are evaluated with sampled completions."""


class Family(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The methods of one table. methods: flags by name. choices: alternatives for further flags, by name of the method.

    flags: of all methods. compare: state whether the best and the worst method differ. contrast: compare every method
    with the reference. reference: name of another method than that of the definitions.
    """

    title: str
    methods: dict[str, str]
    flags: str = ""
    choices: dict[str, tuple[str, ...]] = {}
    compare: bool = False
    contrast: bool = False
    reference: str = ""


class Definitions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of bench/methods.toml. reference: the method that contrasted methods are compared with."""

    profile: str
    flags: str
    reference: str
    families: tuple[Family, ...]

    def methods(self) -> tuple[Method, ...]:
        """All methods, with the flags of their families."""
        return tuple(
            Method(
                name=name,
                family=family.title,
                flags=merged(family.flags, own),
                choices=family.choices.get(name, ()),
            )
            for family in self.families
            for name, own in family.methods.items()
        )


def read_definitions(path: Path = ROOT / "bench" / "methods.toml") -> Definitions:
    """Read the methods. Raises msgspec.ValidationError for unknown keys."""
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Definitions)


DEFINITIONS = read_definitions()


def table(found: Sequence[Outcome]) -> str:
    """Two tables per family, of its methods and of their differences, then the measurement conditions."""
    named = {one.method.name: one for one in found}
    parts = []
    for family in DEFINITIONS.families:
        reference = named.get(family.reference or DEFINITIONS.reference)
        mine = [one for one in found if one.method.family == family.title]
        if mine:
            parts += [f"**{family.title}**", _rows(mine), *comparison(family, mine, reference)]
    return "\n\n".join([*parts, _closing(found)])


def objectives(found: Sequence[Outcome]) -> str:
    """The objectives for users: what each is, and how it did."""
    described = SECTIONS["learner.objective"].types
    rows = [
        [
            f"`{one.method.name}`",
            described[one.method.name].removesuffix("."),
            f"{one.after.mean:.3f} ({min(one.after.values):.3f} to {max(one.after.values):.3f})",
            f"{one.average.mean:.3f}",
            until(one, TARGET, "rollouts"),
        ]
        for one in found
        if one.method.family == DEFINITIONS.families[0].title and one.method.name in described
    ]
    heading = ["objective", "definition", "after training", "averaged over the run", f"completions to {TARGET:.2f}"]
    return markdown(heading, rows, text_columns=2)


def _rows(mine: Sequence[Outcome]) -> str:
    seeds = sorted({trial.seed for one in mine for trial in one.trials})
    heading = ["method", *(f"seed {seed}" for seed in seeds), "mean", "spread", "averaged over the run"]
    sampled = any(trial.pass_at for one in mine for trial in one.trials)
    heading += [f"pass@{SAMPLES}"] if sampled else []
    heading += [f"updates to {TARGET:.2f}", f"completions to {TARGET:.2f}"]
    heading += ["completions", "processor seconds", "peak memory"]
    rows = []
    for one in mine:
        cells = {trial.seed: f"{trial.after:.3f}{'*' if trial.status else ''}" for trial in one.trials}
        rollouts = statistics.median(trial.rollouts for trial in one.trials)
        seconds = statistics.median(trial.cpu_seconds for trial in one.trials)
        rows.append(
            [
                _label(one),
                *(cells.get(seed, "") for seed in seeds),
                f"{one.after.mean:.3f}",
                f"{one.after.spread:.3f}",
                f"{one.average.mean:.3f} ({min(one.average.values):.3f} to {max(one.average.values):.3f})",
                *([pass_at(one)] if sampled else []),
                until(one, TARGET, "step"),
                until(one, TARGET, "rollouts"),
                f"{rollouts:,.0f}",
                f"{seconds:,.0f}",
                _bytes(statistics.median(trial.peak_bytes for trial in one.trials)),
            ]
        )
    return markdown(heading, rows)


def pass_at(one: Outcome) -> str:
    """Mean and range over the seeds of pass@k after training."""
    found = [trial.pass_at[SAMPLES] for trial in one.trials if SAMPLES in trial.pass_at]
    return f"{statistics.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})" if found else ""


def _label(one: Outcome) -> str:
    """The name of the method, and the choice that was found best for it."""
    flags = merged(one.trials[0].flags)
    chosen = next((choice for choice in one.method.choices if set(choice.split()) <= set(flags)), "")
    return f"`{one.method.name}`" + (f" (`{chosen}`)" if chosen else "")


def until(one: Outcome, accuracy: float, unit: Literal["step", "rollouts"]) -> str:
    """Median number of updates or completions to an accuracy over the seeds that reach it; how many do, if not all."""
    points = [trial.reached(accuracy) for trial in one.trials]
    counts: list[int] = [getattr(point, unit) for point in points if point is not None]
    if not counts:
        return "never"
    share = "" if len(counts) == len(points) else f" ({len(counts)} of {len(points)} seeds)"
    return f"{statistics.median(counts):,.0f}{share}"


def comparison(family: Family, mine: Sequence[Outcome], reference: Outcome | None) -> list[str]:
    """A table of the differences between the best and the worst method of a family, and of each from the reference."""
    rows = []
    if family.compare and len(mine) > 1:
        cells = []
        for accuracies in MEASURES.values():
            worst, *_, best = sorted(mine, key=lambda one: accuracies(one).mean)
            cells.append(f"`{best.method.name}`, `{worst.method.name}`: {difference(best, worst, accuracies)}")
        rows.append(["best, worst", *cells])
    if family.contrast and reference is not None:
        rows += [
            [
                f"`{reference.method.name}`, `{one.method.name}`",
                *(difference(reference, one, accuracies) for accuracies in MEASURES.values()),
            ]
            for one in mine
            if one is not reference
        ]
    return [markdown(["difference of", *MEASURES], rows)] if rows else []


def difference(one: Outcome, other: Outcome, accuracies: Callable[[Outcome], Accuracies] = AFTER) -> str:
    """The difference of two means and, in parentheses, the two spreads; in bold type if it is larger than both."""
    mine, others = accuracies(one), accuracies(other)
    by = mine.mean - others.mean
    if min(len(mine.values), len(others.values)) < 2:
        return f"{by:.3f} (one seed)"
    shown = f"{by:.3f} ({mine.spread:.3f}, {others.spread:.3f})"
    return f"**{shown}**" if abs(by) > max(mine.spread, others.spread) else shown


def _closing(found: Sequence[Outcome]) -> str:
    trials = [trial for one in found for trial in one.trials]
    first = trials[0]
    note = (
        f"Profile `{first.flags[1]}`: held-out greedy accuracy after training ({first.before:.3f} before), for each "
        "seed. Spread: from the lowest to the highest seed. Averaged over the run: the area under the learning curve, "
        "divided by the number of updates; mean, lowest and highest seed. Updates and completions to an accuracy: the "
        "first evaluation that reaches it; evaluations are listed in the results. Numbers of completions, processor "
        "seconds and peak memory of MLX arrays are medians. Differences are those of means, with both spreads; those "
        "in bold are larger than both."
    )
    failed = (
        " *: the run ended with an error; its last evaluation counts." if any(trial.status for trial in trials) else ""
    )
    machines = "; ".join(unique(describe_fingerprint(trial.fingerprint) for trial in trials))
    at_once = max(trial.side_by_side for trial in trials)
    commits = ", ".join(unique(trial.fingerprint.commit for trial in trials))
    return f"{note}{failed}\n\n{machines}, {at_once} runs at the same time; commit {commits}. `{COMMAND}`"


def _bytes(value: float) -> str:
    scale, unit = scale_of(value, "bytes")
    return f"{number(value / scale)} {unit}"


def draw(found: Sequence[Outcome], target: Path) -> None:
    """Draw the accuracy of every seed as a point and the mean as a line, one row per method."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    from bench.charts import COLOURS, GREY, OTHERS

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "clotho"
    palette = (*COLOURS.values(), *OTHERS)
    families = unique(one.method.family for one in found)
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.26 * len(found)), layout="constrained")
    for row, one in enumerate(found):
        colour = palette[families.index(one.method.family) % len(palette)]
        axes.plot(one.after.values, [row] * len(one.trials), "o", color=colour, ms=4, alpha=0.7)
        axes.plot([one.after.mean, one.after.mean], [row - 0.35, row + 0.35], color=colour, lw=1.5)
    axes.set_yticks(range(len(found)), [one.method.name for one in found], fontsize=8)
    axes.set(xlim=(0, 1), ylim=(len(found) - 0.5, -0.5))
    axes.set_title("held-out accuracy after training, every seed and the mean", loc="left", fontsize=10)
    axes.set_xlabel(describe_fingerprint(found[0].trials[0].fingerprint), fontsize=9, color=GREY)
    axes.grid(axis="x", alpha=0.25)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


BENCHMARK = TrialBenchmark(
    command=COMMAND,
    about=__doc__,
    results=results_path(NAME),
    profile=DEFINITIONS.profile,
    flags=DEFINITIONS.flags,
    methods=DEFINITIONS.methods(),
    table=table,
)
read = BENCHMARK.read
main = partial(run_trial_benchmark, BENCHMARK)
