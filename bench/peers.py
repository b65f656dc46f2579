"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures whole training runs beside mlx-lm-lora and TRL: the same number of updates, and the time to an accuracy.

    python -m bench peers [--repeats 5] [--only TASK ...] [--contenders NAME ...] [--quick] [--out FILE]

All contenders train the same model with the same adapter, problems, rewards and token limit. `seconds` is training
time: loading is not counted, and evaluation happens with the clock stopped or after the run. `from_command` also counts
the time before the first prompt: imports, loading and, for Clotho, the warmup step and the first parity check. One
repeat is one seed, the same for all contenders, and every run is a separate process.

equal work: seconds for 20 updates of 16 groups of 8 completions at learning rate 1e-3 on the task of local-m3, whatever
the accuracy. The number of completions is equal; the number of tokens depends on the policy and is only similar.

until 0.7: seconds until 0.7 of the held-out problems of learn-m3 are solved, measured greedily after every fifth
update. Each contender has the best settings that `python -m bench search` found for it with the same number of trials
(bench/results/search.jsonl). Clotho runs without collapse detection, which the others do not have. `clotho` is
synchronous, as the others are; `clotho, asynchronous` has the same settings.

slow rewards: seconds for ten updates of the same, with a reward function that takes 50 ms per completion, like a remote
judge. mlx-lm-lora and TRL call it for one completion after the other; Clotho calls it in its worker processes.

long tail: until 0.7, while the engine decodes beside every completion another one that is not trained on, with a
lognormal length (median 16 tokens, mean 27); a group is complete when both are. Clotho only, at most 250 updates.

Each run is added to the results when it ends. A run of the same contender, settings and seed is not repeated, so a
measurement that was stopped continues where it stopped; `--again` repeats all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bench import tables
from bench.charts import draw_bars
from bench.contenders.clotho_train import FLAGS
from bench.contenders.process import Contender, measure_interleaved
from bench.measurement import Measurement, Metric, ratios, results_path
from bench.measurement import read as read_measurements
from bench.studies import search
from bench.studies.search import LEARNING, TARGET, Settings

NAME = "peers"
COMMAND = f"python -m bench {NAME}"
LIMIT = 3600.0
"""Seconds of training after which a run is stopped; its accuracy shows that."""

SEED, SETTINGS = "seed", "settings"
"""Names in the stored lines: the seed in the case, the settings beside the versions."""

METRICS = (
    Metric(name="seconds", unit="s", better="lower"),
    Metric(name="from_command", unit="s", better="lower"),
    Metric(name="updates", unit="updates", better="lower"),
    Metric(name="accuracy", unit="share", better="higher"),
)
CLOCKS = METRICS[:2]
COMPLETIONS = Metric(name="completions", unit="", better="lower")
EACH = Metric(name="seconds_per_completion", unit="s", better="lower")
"""The two factors of the seconds, which follow from what is stored."""


SHOWN = (*METRICS, COMPLETIONS, EACH)
COMPARED = (*CLOCKS, COMPLETIONS, EACH)


class Runner(Struct, frozen=True, kw_only=True):
    """A contender. searched: whose best settings it has; empty: those of the task. changes: what differs from them."""

    contender: Contender
    searched: str = ""
    changes: Settings = {}


CLOTHO = Runner(contender=search.CLOTHO, searched="clotho")
ASYNCHRONOUS = Runner(
    contender=replace(search.CLOTHO, name="clotho, asynchronous"), searched="clotho", changes={"asynchronous": "true"}
)
PEERS = tuple(Runner(contender=one, searched=one.name) for one in (search.MLX_LM_LORA, search.TRL))
SHIPPED = (
    Runner(contender=replace(search.CLOTHO, environment={})),
    Runner(contender=replace(search.CLOTHO, name="clotho, synchronous", environment={FLAGS: "--async false"})),
)


class Task(Struct, frozen=True, kw_only=True):
    """case: what the contenders are told. until_target: stop at the target accuracy."""

    runners: tuple[Runner, ...]
    case: Settings
    until_target: bool = False


TASKS: dict[str, Task] = {
    "equal work": Task(
        runners=(*SHIPPED, *(replace(one, searched="") for one in PEERS)),
        case={
            "profile": "arithmetic", "updates": 20, "batch_size": 16, "group_size": 8, "learning_rate": 1e-3,
            "loss": "bnpo", "stop": "", "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        },
    ),
    "until 0.7": Task(runners=(CLOTHO, ASYNCHRONOUS, *PEERS), case=LEARNING, until_target=True),
    "slow rewards": Task(
        runners=(CLOTHO, ASYNCHRONOUS, *PEERS),
        case=LEARNING | {"profile": "learn-slow-rewards", "reward_seconds": 0.05, "updates": 10},
    ),
    "long tail": Task(
        runners=(CLOTHO, ASYNCHRONOUS),
        case=LEARNING | {"profile": "learn-long-tail", "updates": 250},
        until_target=True,
    ),
}  # fmt: skip
QUICK: Settings = {"updates": 2, "batch_size": 8, "group_size": 8, "evaluate_every": 1}


class MissingSettingsError(Exception):
    """There are no searched settings for a contender; the message has the command that finds them."""


def settings_of(runner: Runner) -> Settings:
    """The best settings of a contender. Raises MissingSettingsError."""
    if not runner.searched:
        return runner.changes
    found = search.best_settings(runner.searched)
    if found is None:
        command = f"python -m bench search --of {runner.searched}"
        raise MissingSettingsError(f"no settings of {runner.searched} reached {TARGET}; run {command}")
    return found | runner.changes


def measure(task: str, runner: Runner, seed: int, settings: Settings) -> list[Measurement]:
    """One run, in its own process; an empty list if it failed. settings: what is not part of the task."""
    stored: Settings = {"task": task, SEED: seed}
    if TASKS[task].until_target:
        stored["target"] = TARGET
    case = TASKS[task].case | settings | stored | {"limit_seconds": LIMIT}
    lines = measure_interleaved(NAME, [runner.contender], [case], METRICS, repeats=1, warm_up=0)
    return [replace(one, case=stored, versions=one.versions | {SETTINGS: described(settings)}) for one in lines]


def described(settings: Settings) -> str:
    """The settings in one line."""
    return " ".join(f"{key}={value}" for key, value in settings.items() if key not in LEARNING) or "of the task"


def is_measured(lines: Sequence[Measurement], task: str, runner: Runner, seed: int, settings: Settings) -> bool:
    """Whether the results contain a run of these settings."""
    wanted = (task, seed, runner.contender.name, described(settings))
    return any((one.case["task"], one.case[SEED], one.contender, one.versions[SETTINGS]) == wanted for one in lines)


def merged(lines: Sequence[Measurement]) -> list[Measurement]:
    """One measurement per task, contender and metric: the newest run of every seed that all contenders have.

    So values of equal index have equal seeds.
    """
    newest = {(str(one.case["task"]), one.contender, one.metric, int(one.case[SEED])): one for one in lines}
    for (task, contender, name, seed), one in list(newest.items()):
        clock = newest.get((task, contender, "seconds", seed))
        if name == "updates" and clock is not None and (each := completions_of_update(one)):
            number = one.values[0] * each
            for factor, value in ((COMPLETIONS, number), (EACH, clock.values[0] / number)):
                newest[task, contender, factor.name, seed] = replace(
                    one, metric=factor.name, unit=factor.unit, values=[value]
                )
    found = []
    for task in tables.unique(task for task, *_ in newest):
        names = tables.unique(contender for other, contender, *_ in newest if other == task)
        seeds = sorted(set.intersection(*(_seeds(newest, task, name) for name in names)))
        for name in names:
            for metric in SHOWN:
                mine = [newest[key] for seed in seeds if (key := (task, name, metric.name, seed)) in newest]
                if mine:
                    case = {key: value for key, value in mine[-1].case.items() if key != SEED}
                    found.append(replace(mine[-1], case=case, values=[one.values[0] for one in mine]))
    return found


def completions_of_update(one: Measurement) -> int:
    """Return the number of completions of an update of a run; 0 if its settings do not say it."""
    given = dict(word.split("=", 1) for word in one.versions[SETTINGS].split() if "=" in word)
    settings = TASKS[str(one.case["task"])].case | given
    return int(settings.get("batch_size", 0)) * int(settings.get("group_size", 0))


def _seeds(newest: Mapping[tuple[str, str, str, int], Measurement], task: str, contender: str) -> set[int]:
    return {seed for other, name, _, seed in newest if (other, name) == (task, contender)}


def read(path: Path | None = None) -> Sequence[Measurement]:
    """Read the results, merged by seed; an empty list if the file does not exist."""
    return merged(read_measurements(path or results_path(NAME)))


def table(results: Sequence[Measurement]) -> str:
    """One table per task, one row per contender; what the seconds mean, and the runs that missed the target."""
    parts = [_of_task(results, task) for task in tables.unique(str(one.case["task"]) for one in results)]
    return "\n\n".join([*parts, tables.closing(results), *_missed(results)])


def _of_task(results: Sequence[Measurement], task: str) -> str:
    """Medians and ranges of one task, and Clotho's ratio seed by seed."""
    mine = {(one.contender, one.metric): one for one in results if one.case["task"] == task}
    shown = [metric for metric in SHOWN if any(name == metric.name for _, name in mine)]
    compared = [metric for metric in shown if metric in COMPARED]
    rows = []
    for contender in tables.unique(contender for contender, _ in mine):
        found = [mine.get((contender, metric.name)) for metric in shown]
        cells = ["" if one is None else tables.spread(one.values, one.unit) for one in found]
        rows.append([contender, *cells, *(_ratio(mine, contender, one.name) for one in compared)])
    titles = [one.name.replace("_", " ") for one in shown]
    ratio_titles = (f"{one.name.replace('_', ' ')}, clotho / this" for one in compared)
    return tables.markdown([task, *titles, *ratio_titles], rows)


def _ratio(mine: Mapping[tuple[str, str], Measurement], contender: str, clock: str) -> str:
    ours, theirs = mine.get((tables.OURS, clock)), mine.get((contender, clock))
    if ours is None or theirs is None or contender == tables.OURS:
        return ""
    return tables.spread(ratios(ours, theirs), "")


def _missed(results: Sequence[Measurement]) -> Iterator[str]:
    """A sentence for each contender with runs that did not reach the target."""
    for one in results:
        missed = sum(value < TARGET for value in one.values)
        if missed and one.metric == "accuracy" and "target" in one.case:
            yield (
                f"{one.case['task']}, `{one.contender}`: {missed} of {len(one.values)} seeds did not reach {TARGET}; "
                "their seconds are those of the whole run."
            )


def draw(results: Sequence[Measurement], target: Path) -> None:
    """Bars of seconds, grouped by task."""
    draw_bars(results, "seconds", target, key="task", title="seconds of training")


def main(argv: Sequence[str]) -> int:
    """Measure the missing runs and print the tables. Returns 2 without searched settings."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = tables.unique(one.contender.name for task in TASKS.values() for one in task.runners)
    parser.add_argument("--repeats", type=int, default=5, help="Number of seeds.")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="Tasks to measure.")
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, help="Contenders to measure.")
    parser.add_argument("--again", action="store_true", help="Repeat runs that the results have.")
    parser.add_argument("--quick", action="store_true", help="Two small updates of Clotho, without searched settings.")
    parser.add_argument("--out", type=Path, default=results_path(NAME), help="Results file to extend.")
    chosen = parser.parse_args(argv)
    try:
        lines = quick(chosen.only) if chosen.quick else run_missing(chosen)
    except MissingSettingsError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    if lines:
        sys.stdout.write(table(merged(lines)) + "\n")
    return 0


def quick(tasks: Sequence[str]) -> Sequence[Measurement]:
    """Two small updates of Clotho for each task; nothing is stored."""
    start = search.SUBJECTS["clotho"].start
    return [
        one
        for task in tasks
        for runner in TASKS[task].runners
        if not runner.contender.foreign
        for one in measure(task, runner, 0, (start if runner.searched else {}) | runner.changes | QUICK)
    ]


def run_missing(chosen: argparse.Namespace) -> Sequence[Measurement]:
    """Measure seed by seed, so that contenders alternate; return all results. Raises MissingSettingsError."""
    jobs = [
        (task, runner, seed, settings_of(runner))
        for task in chosen.only
        for seed in range(chosen.repeats)
        for runner in TASKS[task].runners
        if runner.contender.name in chosen.contenders
    ]
    for done, job in enumerate(jobs, start=1):
        if not chosen.again and is_measured(read_measurements(chosen.out), *job):
            continue
        lines = measure(*job)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        with chosen.out.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
        found = ", ".join(f"{one.metric} {one.values[0]:.3g}" for one in lines)
        sys.stderr.write(f"bench: {done} of {len(jobs)}: {job[0]}, {job[1].contender.name}, seed {job[2]}: {found}\n")
    return read_measurements(chosen.out)
