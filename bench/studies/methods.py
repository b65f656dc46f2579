"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the accuracy that objectives, corrections, ranks and deliberately bad settings reach on a task to be learned.

    python -m bench methods [--arms NAME ...] [--seeds 0 1 2 3 4] [--parallel 2] [--list] [--quick]

bench/studies/methods.toml defines the methods as flags of pipeline.py. Every run is `python pipeline.py FLAGS --seed
S`; all of them take days. `python -m bench figures` writes the tables into the documentation.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bench.charts import COLOURS, GREY, OTHERS, figure
from bench.fingerprint import describe_fingerprint
from bench.runs import Record
from bench.studies.runner import Arm, Column, Study, Trial, column, comparison, merged, rows_of, run_study
from bench.tables import unique
from training_run.profile.keys import SECTIONS

NAME = "methods"
TARGET = 0.7
"""The tables have the updates and the completions until this accuracy."""

SAMPLES = "8"
"""k of the pass@k of methods that are evaluated with sampled completions."""


class Family(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The methods of one table. methods: flags by name. flags: of all of them. reference: what they are compared with.

    extremes: compare the best with the worst method.
    """

    title: str
    methods: dict[str, str]
    flags: str = ""
    reference: str = ""
    extremes: bool = False


class Definitions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of methods.toml."""

    flags: str
    families: tuple[Family, ...]

    def arms(self) -> tuple[Arm, ...]:
        """All methods, with the flags of their families."""
        return tuple(
            Arm(name=name, family=family.title, flags=merged(family.flags, own), reference=family.reference)
            for family in self.families
            for name, own in family.methods.items()
        )


DEFINITIONS = msgspec.convert(tomllib.loads(Path(__file__).with_name("methods.toml").read_text("utf-8")), Definitions)
TO_ROLLOUTS = Column(
    title=f"completions to {TARGET:.2f}",
    value=lambda trial: point.rollouts if (point := trial.reached(TARGET)) else None,
    missing="never",
)
TO_UPDATES = Column(
    title=f"updates to {TARGET:.2f}",
    value=lambda trial: point.step if (point := trial.reached(TARGET)) else None,
    missing="never",
)
ACCURACIES = tuple(
    replace(column(title, name, compare="difference"), middle=statistics.mean)
    for title, name in (("after training", "after"), ("averaged over the run", "average"))
)


def pass_at(record: Record) -> dict[str, float]:
    """pass@k after training, if it was measured."""
    found = record.evaluations[-1].get("pass_at", {}).get(SAMPLES)
    return {f"pass@{SAMPLES}": found["value"]} if found else {}


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=DEFINITIONS.arms(),
    flags=merged(DEFINITIONS.flags, "--monitor.display none --checkpoint.interval 0"),
    quick="--steps 3 --learner.batch-size 8 --eval.problems 8 --eval.interval 1",
    parallel=2,
    measure=pass_at,
    columns=(
        *ACCURACIES,
        column(f"pass@{SAMPLES}", f"pass@{SAMPLES}"),
        TO_UPDATES,
        TO_ROLLOUTS,
        column("completions", "rollouts"),
        column("processor seconds", "cpu_seconds"),
        column("peak memory", "peak_bytes", "bytes"),
    ),
    note=(
        "Held-out greedy accuracy (0.273 before training unless a title says otherwise): means over the seeds, with "
        "lowest and highest; all other columns: medians. Averaged over the run: the area under the learning curve, "
        "divided by the number of updates. "
        "Updates and completions to an accuracy: the first evaluation that reaches it. Peak memory: of MLX arrays. "
        "Differences are those of means, with the distances from the lowest to the highest seed; those in bold are "
        "larger than both."
    ),
)
read, main = STUDY.read, partial(run_study, STUDY)


def table(trials: Sequence[Trial]) -> str:
    """The tables of the study, then the best and the worst method of the families that ask for it."""
    lines = []
    for family in DEFINITIONS.families:
        for one in ACCURACIES if family.extremes else ():
            by_name = {name: [trial for trial in trials if trial.arm == name] for name in family.methods}
            ranked = sorted(filter(by_name.get, by_name), key=lambda name: _mean(one, by_name[name]))
            if len(ranked) > 1:
                worst, best = ranked[0], ranked[-1]
                found = comparison(one, by_name[best], by_name[worst])
                lines.append(f"* {family.title}, {one.title}: best {best}, worst {worst}, difference {found}")
    return "\n\n".join(["\n".join(lines), STUDY.table(trials)]) if lines else STUDY.table(trials)


def _mean(one: Column, trials: Sequence[Trial]) -> float:
    return one.middle([value for trial in trials if (value := one.value(trial)) is not None])


def objectives(trials: Sequence[Trial]) -> str:
    """The objectives for users: how each did. Their definitions are those of the profile's settings."""
    described = SECTIONS["learner.objective"].types
    names = [name for name in DEFINITIONS.families[0].methods if name in described and name in {t.arm for t in trials}]
    rows = rows_of(trials, names, (*ACCURACIES, TO_ROLLOUTS)).splitlines()
    rows[0] = rows[0].replace("|  |", "| objective | definition |", 1)
    rows[1] = f"|---{rows[1]}"
    texts = [row.replace(f"| {name} |", f"| `{name}` | {described[name].removesuffix('.')} |", 1)
             for name, row in zip(names, rows[2:], strict=True)]  # fmt: skip
    return "\n".join([*rows[:2], *texts])


def draw(trials: Sequence[Trial], target: Path) -> None:
    """Draw the accuracy of every seed as a point and the mean as a line, one row per method."""
    palette = (*COLOURS.values(), *OTHERS)
    names, titles = unique(one.arm for one in trials), [family.title for family in DEFINITIONS.families]
    of_family = {arm.name: titles.index(arm.family) for arm in STUDY.arms}
    with figure(target, height=1.2 + 0.26 * len(names)) as axes:
        for row, name in enumerate(names):
            colour = palette[of_family.get(name, 0) % len(palette)]
            found = [one.values["after"] for one in trials if one.arm == name]
            mean = sum(found) / len(found)
            axes.plot(found, [row] * len(found), "o", color=colour, ms=4, alpha=0.7)
            axes.plot([mean, mean], [row - 0.35, row + 0.35], color=colour, lw=1.5)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5))
        axes.set_title("held-out accuracy after training, every seed and the mean", loc="left", fontsize=10)
        axes.set_xlabel(describe_fingerprint(trials[0].fingerprint), fontsize=9, color=GREY)
        axes.grid(axis="x", alpha=0.25)
