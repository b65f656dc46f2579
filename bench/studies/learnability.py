"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Compares what `doctor` forecasts about tasks with what RL then learns.

    python -m bench learnability [--arms NAME ...] [--seeds 0] [--list] [--quick]

A task is a policy and a dataset, made in runs/learnability. The outcome is that of a run: solved before (held-out
accuracy of at least 0.95), learned (the accuracy rises by at least 0.1), or not learned. The line `learnability` of
`doctor` is right if it says "nearly solved", "RL can help", or one of the others, in this order.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

from bench.fingerprint import ROOT
from bench.runs import Record
from bench.studies import warm_up
from bench.studies.runner import Arm, Study, Trial, column, conditions, merged, run_study
from bench.tables import markdown, number
from profiles.embedded_maker import __main__ as embedded
from profiles.embedded_maker.problems import KINDS
from profiles.maker.problem import Generator, Problem, make_problems, write_problems
from profiles.times_table_maker import __main__ as times_table
from profiles.times_table_maker.demonstrations import is_known
from profiles.times_table_maker.problems import ROWS, draw_kind, factors, long_multiplication

NAME = "learnability"
MADE = "runs/learnability"
TRAINING, HELD_OUT = 400, 128
SOLVED, LEARNED = 0.95, 0.1
OUTCOMES = ("solved", "learned", "not learned")
ADVICE = {"nearly solved": "solved", "RL can help": "learned", "warm up": "not learned", "solved always": "not learned"}
"""The outcome that a line of `doctor` forecasts, by its words."""

Problems = tuple[list[Problem], list[Problem]]


def product(rng: Random, digits: int) -> Problem:
    """Ask for a product of a number with so many digits."""
    value, row = rng.randrange(10 ** (digits - 1), 10**digits), rng.choice(ROWS)
    work, answer = long_multiplication(value, row)
    return Problem("product", 1, f"What is {value} * {row}?", answer, work)


def known_product(rng: Random) -> Problem:
    """Ask for a product of which the policy of `learn-m3` knows all parts."""
    while True:
        problem = draw_kind(rng, "four digits")
        value, row = factors(problem)
        if all(is_known(int(digit), row) for digit in str(value)):
            return problem


def pair(rng: Random, sign: str, digits: int) -> Problem:
    """Ask for a sum or a product of two numbers with so many digits."""
    one, other = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    return Problem("pair", 1, f"What is {one} {sign} {other}?", str(one + other if sign == "+" else one * other), ())


def drawn(*generators: Generator) -> Problems:
    """Return problems of generators, equally many of each."""
    return make_problems(generators, 0, training=TRAINING, held_out=HELD_OUT)


def of_kind(kind: str) -> Problems:
    """Return the problems of `local-m3` of one kind; none: those whose answer is a number."""
    training, held_out = (
        [one for one in found if one.kind == kind or (not kind and not one.wrong)] for found in embedded.problems(0)
    )
    return training, held_out


DATASETS: dict[str, Callable[[], Problems]] = {
    **{kind: partial(of_kind, kind) for kind in KINDS},
    "all kinds": partial(embedded.problems, 0),
    "numbers": partial(of_kind, ""),
    "products of the times table": partial(times_table.problems, 0),
    "two digits": lambda: drawn(partial(draw_kind, kind="two digits")),
    "known": lambda: drawn(known_product),
    "seven digits": lambda: drawn(partial(product, digits=7)),
    "known, and seven digits": lambda: drawn(known_product, partial(product, digits=7)),
    "sums of six digits": lambda: drawn(partial(pair, sign="+", digits=6)),
    "products of two numbers": lambda: drawn(partial(pair, sign="*", digits=2)),
}


def task(data: str, policy: str = "embedded", *, steps: int = 20) -> Arm:
    """A dataset for a policy of the project."""
    profile = {"embedded": "local-m3", "weak": "local-m3", "times table": "learn-m3"}[policy]
    return Arm(
        name=f"{data}: {policy} policy",
        data=data,
        flags=merged(
            ("--profile", profile, "--steps", str(steps)),
            ("--data.train", f"{MADE}/{data}/train.jsonl", "--data.heldout", f"{MADE}/{data}/heldout.jsonl"),
            ("--model.path", f"{warm_up.MADE}/policy") if policy == "weak" else (),
        ),
    )


def prepare(arm: Arm, *_: object) -> tuple[str, ...]:
    """Write the dataset of a task, and make its policy."""
    directory = ROOT / MADE / arm.data
    if not directory.exists():
        directory.mkdir(parents=True)
        for part, found in zip(("train", "heldout"), DATASETS[arm.data](), strict=True):
            write_problems(directory / f"{part}.jsonl", found)
    if warm_up.MADE in " ".join(arm.flags):
        warm_up.make(Path(ROOT, warm_up.MADE))
    return ()


def forecast(record: Record) -> dict[str, float]:
    """Return what `doctor` says of the profile of a run."""
    profile = str(record.adapters.parent / "profile.toml")
    command = [sys.executable, "pipeline.py", "doctor", "--json", "--profile", profile]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False).stdout  # findings are a status
    return forecast_of(json.loads(output)["checks"]["learnability"])


def forecast_of(line: str) -> dict[str, float]:
    """Return the numbers in the line `learnability` of `doctor`, and which of the outcomes it expects."""
    found = re.fullmatch(r"pass@1 ([\d.]+), pass@(\d+) ([\d.]+) of \d+ problems: (.*)", line)
    assert found is not None
    expected = next(outcome for words, outcome in ADVICE.items() if found[4].startswith(words))
    return {
        "pass@1": float(found[1]),
        "k": float(found[2]),
        "pass@k": float(found[3]),
        "forecast": float(OUTCOMES.index(expected)),
    }


def outcome(trial: Trial) -> str:
    """What RL did with the task."""
    if trial.values["before"] >= SOLVED:
        return "solved"
    return "learned" if trial.values["after"] - trial.values["before"] >= LEARNED else "not learned"


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=(
        *(task(kind) for kind in ("all kinds", *KINDS)),
        task("sums of six digits"),
        task("products of two numbers"),
        task("products of the times table"),
        task("numbers", "weak"),
        task("numbers", "times table"),
        task("known", "times table"),
        task("seven digits", "times table"),
        task("known, and seven digits", "times table"),
        task("two digits", "times table", steps=100),
    ),
    flags=merged(
        "--async false --checkpoint.interval 0 --eval.interval 1000 --learner.max-equal-batches 0",
        "--monitor.display none",
    ),
    seeds=(0,),
    prepare=prepare,
    measure=forecast,
    columns=(column("before", "before"), column("after", "after")),
    note="",
)
read, main = STUDY.read, partial(run_study, STUDY)


def table(trials: Sequence[Trial]) -> str:
    """One row per task, and how many forecasts are right."""
    rows, right = [], 0
    for one in trials:
        expected, found = OUTCOMES[int(one.values["forecast"])], outcome(one)
        right += expected == found
        rates = [f"{one.values['pass@1']:.2f}", f"{one.values['pass@k']:.2f} (k = {number(one.values['k'])})"]
        accuracies = [f"{one.values[name]:.3f}" for name in ("before", "after")]
        rows.append([one.arm, *rates, expected, number(one.values["updates"]), *accuracies, found])
    heading = ["task", "pass@1", "pass@k", "forecast", "updates", "accuracy before", "after", "outcome"]
    note = (
        f"{right} of {len(trials)} forecasts are right. pass@1 and pass@k are those of `doctor`, accuracies those of "
        f"greedy completions of held-out problems before and after a run. Learned: a rise of at least {LEARNED:g}; "
        f"solved: at least {SOLVED:g} before."
    )
    return f"{markdown(heading, rows)}\n\n{note} {conditions(trials)} `{STUDY.command}`"
