"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Measures the time until a policy has learned profile learn-m3 to 0.7 held-out accuracy, beside mlx-lm-lora and TRL.

    python -m bench search --task learn --of clotho          # then --of mlx-lm-lora and --of trl
    python -m bench time_to_accuracy [--repeats 5] [--only TASK ...] [--contenders NAME ...] [--quick] [--out FILE]

All contenders train the same model with the same adapter, problems, rewards and token limit. Each has the best settings
that `bench.search` found for it with the same number of trials (bench/results/search_learn.jsonl). Accuracy is greedy,
on all held-out problems, after every fifth update. `seconds` is training time: loading is not counted, and evaluation
happens with the clock stopped or after the run. `from_command` also counts the time before the first prompt. One repeat
is one seed, the same for all contenders, and every run is a separate process. `clotho` is synchronous, as the others
are; `clotho, asynchronous` has the same settings.

until 0.7: the task as it is.

slow rewards: seconds for ten updates, whatever the accuracy, with a reward function that takes 50 ms per completion,
like a remote judge. mlx-lm-lora and TRL call it for one completion after the other; Clotho calls it in its worker
processes. The rewards are those of the other tasks, so slowness does not change how many updates learning takes.

long tail: beside every completion, the engine decodes another one that is not trained on, with a lognormal length
(median 16 tokens, mean 27), and a group is complete when both are. Clotho only, synchronous and asynchronous, at most
250 updates.

Each run is added to bench/results/time_to_accuracy.jsonl when it ends. A run of the same contender, settings and seed
is not repeated, so a measurement that was stopped continues where it stopped. Clotho's runs are repeated after a change
of its sources, which no other contender executes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bench import search, startup_training
from bench.contenders.process import Contender, measure_interleaved
from bench.fingerprint import training_sources
from bench.measurement import Measurement, results_path
from bench.measurement import read as read_measurements
from bench.search import LEARNING, Settings
from bench.startup_training import METRICS
from bench.tables import unique

NAME = "time_to_accuracy"
COMMAND = "python -m bench time_to_accuracy"
TARGET = search.TASKS["learn"].target
LIMIT = 3600.0
"""Seconds of training after which a run is stopped; its accuracy shows that."""

SEED, SETTINGS, SOURCES = "seed", "settings", "training sources"
"""Names in the stored lines: the seed in the case, the other two beside the versions."""


own_sources = cache(training_sources)


class Runner(Struct, frozen=True, kw_only=True):
    """A contender and what differs from the best settings of `searched`."""

    contender: Contender
    searched: str
    changes: Settings = {}


CLOTHO = Runner(contender=search.CLOTHO, searched="clotho")
ASYNCHRONOUS = Runner(
    contender=replace(search.CLOTHO, name="clotho, asynchronous"),
    searched="clotho",
    changes={"asynchronous": "true"},
)
PEERS = tuple(Runner(contender=one, searched=one.name) for one in (search.MLX_LM_LORA, search.TRL))
ALL = (CLOTHO, ASYNCHRONOUS, *PEERS)


class Task(Struct, frozen=True, kw_only=True):
    """changes: keys of the case that differ from the plain task. until_target: stop at the target accuracy."""

    runners: tuple[Runner, ...]
    changes: Settings = {}
    until_target: bool = True


TASKS: dict[str, Task] = {
    "until 0.7": Task(runners=ALL),
    "slow rewards": Task(
        runners=ALL,
        changes={"profile": "learn-slow-rewards", "reward_seconds": 0.05, "updates": 10},
        until_target=False,
    ),
    "long tail": Task(runners=(CLOTHO, ASYNCHRONOUS), changes={"profile": "learn-long-tail", "updates": 250}),
}

QUICK: Settings = {"updates": 2, "batch_size": 8, "group_size": 8, "evaluate_every": 1}


class MissingSettingsError(Exception):
    """There are no searched settings for a contender; the message has the command that finds them."""


def settings_of(runner: Runner) -> Settings:
    """The best settings of a contender. Raises MissingSettingsError."""
    found = search.best_settings("learn", runner.searched)
    if found is None:
        command = f"python -m bench search --task learn --of {runner.searched}"
        raise MissingSettingsError(f"no settings of {runner.searched} reached {TARGET}; run {command}")
    return found | runner.changes


def measure(task: str, runner: Runner, seed: int, settings: Settings) -> list[Measurement]:
    """One run, in its own process; an empty list if it failed. settings: all keys of the case but task, limit, seed."""
    stored: Settings = {"task": task, SEED: seed}
    if TASKS[task].until_target:
        stored["target"] = TARGET
    case = LEARNING | TASKS[task].changes | settings | stored | {"limit_seconds": LIMIT}
    lines = measure_interleaved(NAME, [runner.contender], [case], METRICS, repeats=1, command=COMMAND, warm_up=0)
    known = {SETTINGS: described(settings)}
    if executed := sources(runner):
        known[SOURCES] = executed
    return [replace(one, case=stored, versions=one.versions | known) for one in lines]


def sources(runner: Runner) -> str:
    """A hash of Clotho's sources; empty for a contender that does not execute them."""
    return "" if runner.contender.foreign else own_sources()


def described(settings: Settings) -> str:
    """The settings in one line."""
    return " ".join(f"{key}={value}" for key, value in settings.items() if key not in LEARNING)


def is_measured(lines: Sequence[Measurement], task: str, runner: Runner, seed: int, settings: Settings) -> bool:
    """Whether the results contain a run of these settings with the present sources."""
    wanted = (task, seed, runner.contender.name, described(settings), sources(runner))
    return any(
        (one.case["task"], one.case[SEED], one.contender, one.versions[SETTINGS], one.versions.get(SOURCES, ""))
        == wanted
        for one in lines
    )


def merged(lines: Sequence[Measurement]) -> list[Measurement]:
    """One measurement per task, contender and metric: the newest run of every seed that all contenders have.

    So values of equal index have equal seeds.
    """
    newest = {(str(one.case["task"]), one.contender, one.metric, int(one.case[SEED])): one for one in lines}
    found = []
    for task in unique(task for task, *_ in newest):
        names = unique(contender for other, contender, *_ in newest if other == task)
        seeds = sorted(set.intersection(*(_seeds(newest, task, name) for name in names)))
        for name in names:
            for metric in METRICS:
                mine = [
                    newest[task, name, metric.name, seed] for seed in seeds if (task, name, metric.name, seed) in newest
                ]
                if mine:
                    case = {key: value for key, value in mine[-1].case.items() if key != SEED}
                    values = [one.values[0] for one in mine]
                    found.append(replace(mine[-1], case=case, values=values))
    return found


def _seeds(newest: Mapping[tuple[str, str, str, int], Measurement], task: str, contender: str) -> set[int]:
    return {seed for other, name, _, seed in newest if (other, name) == (task, contender)}


def read(path: Path | None = None) -> Sequence[Measurement]:
    """Read the results, merged by seed; an empty list if the file does not exist."""
    return merged(read_measurements(path or results_path(NAME)))


def table(results: Sequence[Measurement]) -> str:
    """One table per task with the ratio of Clotho to each other contender, and the runs that missed the target."""
    return "\n\n".join([startup_training.table(results), *_missed(results)])


def _missed(results: Sequence[Measurement]) -> Iterator[str]:
    """A sentence for each contender with runs that did not reach the target."""
    for one in results:
        missed = sum(value < TARGET for value in one.values)
        if missed and one.metric == "accuracy" and "target" in one.case:
            yield (
                f"{one.case['task']}, `{one.contender}`: {missed} of {len(one.values)} seeds did not reach {TARGET}; "
                "their seconds are those of the whole run."
            )


draw = startup_training.draw


def main(argv: Sequence[str]) -> int:
    """Measure the missing runs and print the tables. Returns 2 without searched settings."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [runner.contender.name for runner in ALL]
    parser.add_argument("--repeats", type=int, default=5, help="Number of seeds.")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="Tasks to measure.")
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, help="Contenders to measure.")
    parser.add_argument("--quick", action="store_true", help="Two small updates of Clotho, without searched settings.")
    parser.add_argument("--out", type=Path, default=results_path(NAME), help="Results file to extend.")
    chosen = parser.parse_args(argv)
    try:
        if chosen.quick:
            lines: Sequence[Measurement] = quick(chosen.only)
        else:
            run_missing(chosen.only, chosen.contenders, chosen.repeats, chosen.out)
            lines = read_measurements(chosen.out)
    except MissingSettingsError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    if lines:
        sys.stdout.write(table(merged(lines)) + "\n")
    return 0


def quick(tasks: Sequence[str]) -> list[Measurement]:
    """Two small updates of Clotho for each task; nothing is stored."""
    (start,) = search.TASKS["learn"].subjects["clotho"].starts
    both = [runner for runner in ALL if runner.searched == "clotho"]
    return [
        one for task in tasks for runner in both for one in measure(task, runner, 0, start | runner.changes | QUICK)
    ]


def run_missing(tasks: Sequence[str], contenders: Sequence[str], repeats: int, out: Path) -> None:
    """Measure seed by seed, so that contenders alternate. Raises MissingSettingsError."""
    jobs = [
        (task, runner, seed, settings_of(runner))
        for task in tasks
        for seed in range(repeats)
        for runner in TASKS[task].runners
        if runner.contender.name in contenders
    ]
    for done, job in enumerate(jobs, start=1):
        if is_measured(read_measurements(out), *job):
            continue
        lines = measure(*job)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
        found = ", ".join(f"{one.metric} {one.values[0]:.3g}" for one in lines)
        sys.stderr.write(f"bench: {done} of {len(jobs)}: {job[0]}, {job[1].contender.name}, seed {job[2]}: {found}\n")
