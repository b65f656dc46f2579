"""Run the arms of a study with several seeds, in turns, and put medians and ranges into a table.

A trial is one run of `python pipeline.py`, identified by its flags, its seed and the commit of its sources. It is added
to the results file when it ends, and not repeated by a later call, so that a measurement that was stopped continues
where it stopped. Arms take turns, and every second seed has them in the opposite order, so that a slow change of the
machine touches all of them. With `--against COMMIT`, each arm also runs with the sources of a commit, next to the arm
of this checkout.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bench.fingerprint import ROOT, Fingerprint, describe_fingerprint, fingerprint, working_tree
from bench.measurement import results_path
from bench.runs import PipelineRun, Record, training_began
from bench.tables import markdown, spread, unique

ONE_THREAD = {"MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of runs at the same time, so that they do not compete for threads."""

POLL_SECONDS = 0.2

SAMPLED = ("rl", "distill")
"""Kinds of stages that learn from completions of the policy."""


Key = tuple[frozenset[tuple[str, str]], str, int, str]
"""What identifies a trial: flags, whose order does not matter, data, seed and sources."""


def key_of(flags: Sequence[str], data: str, seed: int, sources: str) -> Key:
    """The key of a trial."""
    return frozenset(zip(flags[::2], flags[1::2], strict=True)), data, seed, sources


class Arm(Struct, frozen=True, kw_only=True):
    """One of the settings that a study compares. family: title of its table. reference: arm that it is compared with.

    data: name of what the study prepares for it, if arms differ in that. quick: flags of its quick form, in place of
    those of the study.
    """

    name: str
    flags: tuple[str, ...] = ()
    data: str = ""
    family: str = ""
    reference: str = ""
    quick: str = ""


class Point(Struct, frozen=True, array_like=True):
    """One evaluation. seconds: of training. rollouts: completions of all groups that had ended."""

    step: int
    seconds: float
    rollouts: int
    accuracy: float


class Trial(Struct, frozen=True, kw_only=True):
    """One run. flags: all flags but the seed. data: as of its arm. sources: a commit; empty for those of this checkout.

    curve: every evaluation, that of the initial policy first. values: see `standard_values`, and those of the study.
    side_by_side: number of runs at the same time. load: mean number of busy processes in the last minute, at the end.
    """

    arm: str
    flags: tuple[str, ...]
    data: str = ""
    seed: int
    sources: str = ""
    curve: tuple[Point, ...] = ()
    values: dict[str, float] = {}
    status: int = 0
    side_by_side: int = 1
    load: float = 0.0
    command: str
    fingerprint: Fingerprint

    def reached(self, accuracy: float) -> Point | None:
        """The first evaluation with at least this accuracy; None if there is none."""
        return next((point for point in self.curve if point.accuracy >= accuracy), None)


class Column(Struct, frozen=True, kw_only=True):
    """A column of the table. value: of a trial; None if it has none. unit: as in `bench.tables`. missing: for no value.

    middle: of the seeds. compare: how arms are compared with their reference, if at all: `difference` of the means, or
    `ratio` seed by seed.
    """

    title: str
    value: Callable[[Trial], float | None]
    unit: str = ""
    middle: Callable[[Sequence[float]], float] = statistics.median
    missing: str = "-"
    compare: str = ""


def column(title: str, name: str, unit: str = "", *, compare: str = "") -> Column:
    """A column of a recorded value."""
    return Column(title=title, value=lambda trial: trial.values.get(name), unit=unit, compare=compare)


class Study(Struct, frozen=True, kw_only=True):
    """What a study measures.

    about: docstring of its module. flags: of every arm, unless the arm sets them itself. note: below the table. target:
    accuracy at which a run is drained. parallel: runs at the same time. measure: further values of a run. prepare:
    further flags of an arm and seed, whose files may be in the given directory; they are not part of the record.
    """

    name: str
    about: str | None
    arms: tuple[Arm, ...]
    columns: tuple[Column, ...]
    note: str
    flags: tuple[str, ...] = ()
    quick: str = "--steps 2 --learner.batch-size 2 --sampling.group-size 2 --eval.problems 8"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    target: float = math.inf
    parallel: int = 1
    measure: Callable[[Record], dict[str, float]] = lambda _: {}
    prepare: Callable[[Arm, int, Path], Sequence[str]] = lambda *_: ()

    @property
    def command(self) -> str:
        """The command that runs it."""
        return f"python -m bench {self.name}"

    @property
    def results(self) -> Path:
        """The results file."""
        return results_path(self.name)

    def flags_of(self, arm: Arm, *, quick: bool = False) -> tuple[str, ...]:
        """All flags of an arm. quick: of its quick form."""
        return merged(self.flags, arm.flags, (arm.quick or self.quick) if quick else "")

    def read(self, path: Path | None = None, *, quick: bool = False) -> list[Trial]:
        """The newest trial of every arm and seed, in this order. Arms with equal flags share their trials.

        quick: the trials of the quick form.
        """
        known = read_trials(path or self.results)
        found = []
        for arm in self.arms:
            wanted = key_of(self.flags_of(arm, quick=quick), arm.data, 0, "")[:2]
            mine = [(key[2:], one) for key, one in known.items() if key[:2] == wanted]
            ordered = sorted(mine, key=lambda one: one[0])
            found += [replace(one, arm=_label(arm.name, one.sources)) for _, one in ordered]
        return found

    def table(self, trials: Sequence[Trial]) -> str:
        """A table per family, each followed by the comparisons with the references; then note and conditions."""
        parts = []
        for family in unique(arm.family for arm in self.arms):
            arms = [arm for arm in self.arms if arm.family == family]
            names = [name for name in unique(one.arm for one in trials) if name.partition(" at ")[0] in _names(arms)]
            if names:
                parts += [f"**{family}**"] if family else []
                parts += [rows_of(trials, names, self.columns), *compared(trials, arms, names, self.columns)]
        return "\n\n".join([*parts, f"{self.note} {conditions(trials)} `{self.command}`"])


def _names(arms: Sequence[Arm]) -> set[str]:
    return {arm.name for arm in arms}


def _label(name: str, sources: str) -> str:
    return f"{name} at {sources}" if sources else name


# -- table --------------------------------------------------------------------------------------------------------


def rows_of(trials: Sequence[Trial], names: Sequence[str], columns: Sequence[Column]) -> str:
    """One row per arm: the middle of the seeds, with lowest and highest. Columns without a value are left out."""
    by_name = {name: [one for one in trials if one.arm == name] for name in names}
    shown = [one for one in columns if any(one.value(trial) is not None for name in names for trial in by_name[name])]
    rows = [[name, *(_cell(one, by_name[name]) for one in shown), str(len(by_name[name]))] for name in names]
    return markdown(["", *(one.title for one in shown), "seeds"], rows)


def _cell(one: Column, trials: Sequence[Trial]) -> str:
    values = [value for trial in trials if (value := one.value(trial)) is not None]
    if not values:
        return one.missing
    share = "" if len(values) == len(trials) else f", {len(values)} of {len(trials)} seeds"
    return f"{spread(values, one.unit, middle=one.middle)}{share}"


def compared(
    trials: Sequence[Trial], arms: Sequence[Arm], names: Sequence[str], columns: Sequence[Column]
) -> Iterator[str]:
    """A table of the arms that have a reference, if there are any: what each column says that it compares."""
    kept, rows = [one for one in columns if one.compare], []
    pairs = [(arm.name, arm.reference) for arm in arms if arm.reference and arm.reference != arm.name]
    pairs += [(name, name.partition(" at ")[0]) for name in names if " at " in name]
    for name, reference in pairs:
        mine, theirs = ([one for one in trials if one.arm == wanted] for wanted in (name, reference))
        if mine and theirs:
            rows.append([f"`{name}` and `{reference}`", *(comparison(one, mine, theirs) for one in kept)])
    if kept and rows:
        yield markdown(["compared", *(f"{one.title}, {one.compare}" for one in kept)], rows)


def comparison(one: Column, mine: Sequence[Trial], theirs: Sequence[Trial]) -> str:
    """Ratio: of trials with equal seeds, median and range. Difference: of the means, with both ranges' widths.

    A difference that is larger than both widths is in bold type.
    """
    values, others = ({trial.seed: one.value(trial) for trial in trials} for trials in (mine, theirs))
    if one.compare == "ratio":
        pairs = [(ours, other) for seed, ours in values.items() if (other := others.get(seed)) and ours is not None]
        return spread([ours / other for ours, other in pairs], "") if pairs else ""
    both = [[value for value in found.values() if value is not None] for found in (values, others)]
    if not all(both):
        return ""
    by, widths = statistics.mean(both[0]) - statistics.mean(both[1]), [max(found) - min(found) for found in both]
    shown = f"{by:+.3f} ({widths[0]:.3f}, {widths[1]:.3f})"
    return f"**{shown}**" if min(map(len, both)) > 1 and abs(by) > max(widths) else shown


def conditions(trials: Sequence[Trial]) -> str:
    """Machines and commits; the load if it was recorded; how many runs shared the machine, and how many failed."""
    found = "; ".join(unique(describe_fingerprint(one.fingerprint) for one in trials))
    together, load = max(one.side_by_side for one in trials), max(one.load for one in trials)
    found += f", {together} runs at the same time" if together > 1 else ""
    found += f", load at most {load:.1f}" if load else ""
    failed = sum(one.status != 0 for one in trials)
    found += f"; {failed} runs ended with an error, their last evaluation counts" if failed else ""
    return f"{found}; commit {', '.join(unique(one.fingerprint.commit for one in trials))}."


# -- runs ---------------------------------------------------------------------------------------------------------


def standard_values(record: Record) -> tuple[tuple[Point, ...], dict[str, float]]:
    """The evaluations of a run, and what every study records.

    Stages of demonstrations and of pairs sample no completions.
    before, after: held-out accuracy. average: accuracy averaged over the updates (area under the learning curve, by
    trapezoids). updates: applied. rollouts: completions. seconds: of training, with the evaluations between updates.
    elapsed, cpu_seconds: of the whole process. zero_variance: share of the groups. swap: seconds of weight swaps.
    """
    steps, began, size = record.metrics, training_began(record.metrics), record.profile["sampling"]["group_size"]
    kinds = [stage["kind"] for stage in record.profile.get("stages", ())]
    by_stage: dict[int | None, int] = {
        number: size if kind in SAMPLED else 0 for number, kind in enumerate(kinds, start=1)
    }
    seconds, rollouts, total = {0: 0.0}, {0: 0}, 0
    for line in steps:
        sampled = by_stage.get(line.get("stages/stage"), size)
        total += sampled * (line["groups/trained"] + line["groups/discarded"])
        seconds[line["step"]], rollouts[line["step"]] = line["time/run"] - began, total
    curve = tuple(
        Point(line["step"], seconds[line["step"]], rollouts[line["step"]], line["accuracy"])
        for line in record.evaluations
        if line["step"] in seconds and line["accuracy"] is not None
    )
    equal = sum(line["groups/discarded_by_reason"].get("zero_variance", 0) for line in steps)
    swaps = [line["time/weight_swap"] for line in steps if line["time/weight_swap"] is not None]
    values = {
        "updates": steps[-1]["policy_version"],
        "rollouts": total,
        "tokens": sum(line["completion_length/total"] for line in steps),
        "seconds": steps[-1]["time/run"] - began,
        "elapsed": record.elapsed,
        "cpu_seconds": record.cpu_seconds,
        "peak_bytes": max(line["peak_memory_bytes"] for line in steps),
        "zero_variance": equal * size / total if total else 0.0,
        **({"swap_median": statistics.median(swaps), "swap_longest": max(swaps)} if swaps else {}),
    }
    if curve:
        values |= {"before": curve[0].accuracy, "after": curve[-1].accuracy, "average": average(curve)}
    return curve, values


def average(curve: Sequence[Point]) -> float:
    """Accuracy averaged over the updates."""
    updates = curve[-1].step - curve[0].step
    areas = ((one.accuracy + other.accuracy) / 2 * (other.step - one.step) for one, other in pairwise(curve))
    return sum(areas) / updates if updates else curve[-1].accuracy


def merged(*flags: Sequence[str] | str) -> tuple[str, ...]:
    """Flags with their values; a later value of a flag replaces the earlier one. Every flag has one value."""
    found: dict[str, str] = {}
    for words in (shlex.split(part) if isinstance(part, str) else part for part in flags):
        found |= dict(zip(words[::2], words[1::2], strict=True))
    return tuple(word for flag in found.items() for word in flag)


def read_trials(path: Path) -> dict[Key, Trial]:
    """The newest trials of a results file; empty if it does not exist."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    trials = [msgspec.json.decode(line, type=Trial) for line in lines]
    return {key_of(one.flags, one.data, one.seed, one.sources): one for one in trials}


class Job(Struct, frozen=True, kw_only=True):
    """A trial to run. root: of the sources."""

    arm: Arm
    flags: tuple[str, ...]
    seed: int
    sources: str
    root: Path

    @property
    def key(self) -> Key:
        """The key of its trial."""
        return key_of(self.flags, self.arm.data, self.seed, self.sources)

    @property
    def command(self) -> str:
        """The command of its run."""
        return shlex.join(["python", "pipeline.py", *self.flags, "--seed", str(self.seed)])


def jobs_of(study: Study, chosen: argparse.Namespace, against: Path | None) -> list[Job]:
    """The trials in the order in which they are run."""
    arms, found = [arm for arm in study.arms if arm.name in chosen.arms], list[Job]()
    for place, seed in enumerate(chosen.seeds):
        mine = [
            Job(arm=arm, flags=study.flags_of(arm, quick=chosen.quick), seed=seed, sources=sources, root=root)
            for arm in arms
            for sources, root in (("", ROOT), *(((chosen.against, against),) if against else ()))
        ]
        found += reversed(mine) if place % 2 else mine
    return found


def run(study: Study, jobs: Sequence[Job], chosen: argparse.Namespace) -> Iterator[tuple[Job, Trial | None]]:
    """Run jobs, some at the same time, and yield each when it has ended; None: it ended before its first update."""
    waiting, running = list(reversed(jobs)), list[tuple[Job, PipelineRun]]()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            while waiting or running:
                while waiting and len(running) < chosen.parallel:
                    job = waiting.pop()
                    running.append((job, _start(study, job, Path(scratch), chosen)))
                time.sleep(POLL_SECONDS)
                for job, process in [one for one in running if _has_ended(one[1], study.target)]:
                    running.remove((job, process))
                    yield job, _trial(study, job, process, chosen.parallel)
        finally:
            for _, process in running:
                process.close()


def _start(study: Study, job: Job, scratch: Path, chosen: argparse.Namespace) -> PipelineRun:
    directory = Path(tempfile.mkdtemp(dir=scratch))
    further = study.prepare(job.arm, job.seed, directory)
    before = ["chrt", "--rr", str(chosen.priority)] if chosen.priority else []
    environment = ONE_THREAD if chosen.parallel > 1 else {}
    arguments = [*job.flags, "--seed", str(job.seed), *further]
    return PipelineRun(arguments, environment=environment, quiet=True, root=job.root, before=before)


def _has_ended(process: PipelineRun, target: float) -> bool:
    """Whether a run has ended; drains it at its target."""
    if not process.ended() and target < math.inf and process.best_accuracy() >= target:
        process.drain()
        process.ended(wait=True)
    return process.ended()


def _trial(study: Study, job: Job, process: PipelineRun, parallel: int) -> Trial | None:
    with process:
        try:
            record = process.record()
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"bench: {job.command}: exit status {error.returncode} without an update\n")
            return None
        curve, values = standard_values(record)
        values |= study.measure(record)
    return Trial(
        arm=job.arm.name,
        flags=job.flags,
        data=job.arm.data,
        seed=job.seed,
        sources=job.sources,
        command=job.command,
        curve=curve,
        values=values,
        status=0 if study.target < math.inf and record.status == 130 else record.status,
        side_by_side=parallel,
        load=os.getloadavg()[0],
        fingerprint=fingerprint(),
    )


def run_study(study: Study, argv: Sequence[str]) -> int:
    """Run the missing trials and print the table. Returns 1 if a run ended before its first update."""
    chosen = _parser(study).parse_args(argv)
    chosen.seeds = chosen.seeds or study.seeds[: 1 if chosen.quick else None]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        against = stack.enter_context(working_tree(chosen.against)) if chosen.against else None
        path: Path = chosen.out or (scratch / "quick.jsonl" if chosen.quick else study.results)
        known = {} if chosen.again else read_trials(path)
        jobs = list({job.key: job for job in jobs_of(study, chosen, against) if job.key not in known}.values())
        if chosen.list:
            sys.stdout.writelines(f"{job.command}\n" for job in jobs)
            return 0
        complete = True
        for done, (job, trial) in enumerate(run(study, jobs, chosen), start=1):
            complete = complete and trial is not None
            if trial is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(msgspec.json.encode(trial) + b"\n")
            shown = {key: f"{value:.4g}" for key, value in trial.values.items()} if trial else "no update"
            sys.stderr.write(
                f"bench: {done} of {len(jobs)}: {_label(job.arm.name, job.sources)}, seed {job.seed}: {shown}\n"
            )
        if trials := study.read(path, quick=chosen.quick):
            sys.stdout.write(study.table(trials) + "\n")
    return 0 if complete else 1


def _parser(study: Study) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=study.command, description=study.about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [arm.name for arm in study.arms]
    parser.add_argument("--arms", nargs="+", choices=names, default=names, metavar="NAME", help="Default: all.")
    seeds = ", ".join(map(str, study.seeds))
    parser.add_argument("--seeds", type=int, nargs="+", help=f"Default: {seeds}; with --quick the first one.")
    parser.add_argument("--against", default="", metavar="COMMIT", help="Also run its sources, in turns.")
    parser.add_argument("--parallel", type=int, default=study.parallel, help="Runs at the same time, one thread each.")
    parser.add_argument("--priority", type=int, default=0, help="Real-time priority of the runs (Linux, needs rights).")
    parser.add_argument("--again", action="store_true", help="Repeat trials that the results file has.")
    parser.add_argument("--quick", action="store_true", help="A few small updates of every arm; nothing is kept.")
    parser.add_argument("--list", action="store_true", help="List the missing runs, and exit.")
    parser.add_argument("--out", type=Path, help=f"Results file to extend; default: {study.results.name}.")
    return parser
