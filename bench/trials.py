"""Training runs of named methods with several seeds: side by side, recorded one by one, continued after a stop.

A trial is one run of `python pipeline.py`. It is identified by its flags and its seed. A trial that the results file
contains is not repeated, so a measurement that was stopped continues where it stopped. A trial that was run with other
sources of training counts if the present sources still compute the same weights: a run with its flags and seed is
repeated for a few updates, and the hashes of the weights are compared. Weights also depend on the processor: if they
differ, the sources of the trial's commit repeat the updates too.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from bench.fingerprint import ROOT, Fingerprint, fingerprint, training_sources, working_tree
from bench.runs import PipelineRun, Record, training_began

ONE_THREAD = {"MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Environment of a trial: two trials on two cores do not compete for threads."""

SEARCH_SEED = 1000
"""The seed of trials that choose between the `choices` of a method; it is not one of the measured seeds."""

ALWAYS = "--monitor.display none --checkpoint.interval 0"
QUICK = "--steps 2 --learner.batch-size 8 --eval.problems 8 --eval.interval 1"
POLL_SECONDS = 0.1

CHECKED_UPDATES = 4
CHECK = f"--steps {CHECKED_UPDATES} --eval.interval 2"
"""A run with these flags decides whether the present sources compute the weights of an earlier trial."""


class Method(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with a name. family: name of the table that lists the method.

    flags: flags of pipeline.py. choices: alternatives for further flags; the one with the highest accuracy is measured.
    """

    name: str
    family: str = ""
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


class Point(Struct, frozen=True, array_like=True):
    """One evaluation. seconds: of training. rollouts: completions of all groups that had ended."""

    step: int
    seconds: float
    rollouts: int
    accuracy: float


class Trial(Struct, frozen=True, kw_only=True):
    """One run. flags: all flags except the seed. curve: every evaluation, the initial policy first.

    updates: applied policy updates. rollouts: completions. tokens: of the completions. seconds: of training, with the
    evaluations between updates. elapsed, cpu_seconds: of the whole process. peak_bytes: of MLX arrays. status: exit
    status; a run that failed counts with its last evaluation. side_by_side: number of runs at the same time. sources:
    hash of the sources of training. first_weights: hash of the weights after each of the first updates. pass_at:
    pass@k of the last evaluation by k, if it sampled completions.
    """

    method: str
    flags: tuple[str, ...]
    seed: int
    curve: tuple[Point, ...]
    updates: int
    rollouts: int
    tokens: int
    seconds: float
    elapsed: float
    cpu_seconds: float
    peak_bytes: int
    status: int
    side_by_side: int
    sources: str
    command: str
    fingerprint: Fingerprint
    first_weights: tuple[str, ...] = ()
    pass_at: Mapping[str, float] = {}

    @property
    def before(self) -> float:
        """Held-out accuracy of the initial policy."""
        return self.curve[0].accuracy

    @property
    def after(self) -> float:
        """Held-out accuracy of the last evaluation."""
        return self.curve[-1].accuracy

    @property
    def average(self) -> float:
        """Held-out accuracy averaged over the updates of the run: area under the learning curve, trapezoidal rule."""
        updates = self.curve[-1].step - self.curve[0].step
        areas = ((one.accuracy + other.accuracy) / 2 * (other.step - one.step) for one, other in pairwise(self.curve))
        return sum(areas) / updates if updates else self.after

    def reached(self, accuracy: float) -> Point | None:
        """The first evaluation with at least this accuracy; None if there is none."""
        return next((point for point in self.curve if point.accuracy >= accuracy), None)


class Accuracies(Struct, frozen=True):
    """An accuracy of each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.mean(self.values)

    @property
    def spread(self) -> float:
        """Distance from the lowest to the highest."""
        return max(self.values) - min(self.values)


class Outcome(Struct, frozen=True, kw_only=True):
    """The trials of one method, at least one, ordered by seed."""

    method: Method
    trials: tuple[Trial, ...]

    @property
    def after(self) -> Accuracies:
        """Accuracy after training."""
        return Accuracies(tuple(trial.after for trial in self.trials))

    @property
    def average(self) -> Accuracies:
        """Accuracy averaged over the run."""
        return Accuracies(tuple(trial.average for trial in self.trials))


class Job(Struct, frozen=True, kw_only=True):
    """A trial to run."""

    method: str
    flags: tuple[str, ...]
    seed: int

    @property
    def arguments(self) -> list[str]:
        """The arguments of pipeline.py."""
        return [*self.flags, "--seed", str(self.seed)]


Key = tuple[tuple[str, ...], int]
Start = Callable[[Sequence[str], Path], PipelineRun]


def start_run(arguments: Sequence[str], root: Path) -> PipelineRun:
    """Start a trial with the sources at `root`; its errors go to standard error."""
    return PipelineRun(arguments, environment=ONE_THREAD, quiet=True, root=root)


class TrialBenchmark(Struct, frozen=True, kw_only=True):
    """A benchmark of trials. command: `python -m bench ...`. about: the module docstring. results: the results file.

    profile: of every method. flags: of every method, unless the method sets them itself. table: formats the outcomes.
    """

    command: str
    about: str | None
    results: Path
    profile: str
    flags: str
    methods: tuple[Method, ...]
    table: Callable[[Sequence[Outcome]], str]

    def read(self) -> list[Outcome]:
        """The measured methods of the results file."""
        return outcomes(self.methods, merged(("--profile", self.profile), self.flags, ALWAYS), self.results)


def run_trial_benchmark(benchmark: TrialBenchmark, argv: Sequence[str]) -> int:
    """Run the missing trials and print the table. Returns 1 if a run ended before its first update."""
    chosen = _parser(benchmark).parse_args(argv)
    methods = [method for method in benchmark.methods if method.name in chosen.methods]
    flags, seeds = [("--profile", chosen.profile), benchmark.flags, ALWAYS], chosen.seeds
    if chosen.quick:
        seeds = seeds[:1]
        methods = [
            structs.replace(method, flags=merged(method.flags, QUICK), choices=method.choices[:1])
            for method in methods[:2]
        ]
    with tempfile.TemporaryDirectory() as scratch:
        path = chosen.out or (Path(scratch, "quick.jsonl") if chosen.quick else benchmark.results)
        plan = Plan(methods, seeds, common=merged(*flags), path=path)
        if chosen.list:
            sys.stdout.write(plan.describe(chosen.parallel))
            return 0
        complete = plan.run(chosen.parallel)
        if found := outcomes(methods if chosen.quick else benchmark.methods, merged(*flags), path):
            sys.stdout.write(benchmark.table(found) + "\n")
    return 0 if complete else 1


def _parser(benchmark: TrialBenchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=benchmark.command, description=benchmark.about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [method.name for method in benchmark.methods]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="NAME", help="Default: all.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--parallel", type=int, default=2, help="Number of runs at the same time, one thread each.")
    parser.add_argument("--profile", default=benchmark.profile, help=f"Default: {benchmark.profile}.")
    parser.add_argument("--quick", action="store_true", help="Two small updates of the first two methods.")
    parser.add_argument("--list", action="store_true", help="List the missing runs and their time, and exit.")
    parser.add_argument("--out", type=Path, help=f"Results file to extend; default: {benchmark.results.name}.")
    return parser


class Plan:
    """The trials of some methods and seeds. common: flags of every trial. path: results file."""

    def __init__(self, methods: Sequence[Method], seeds: Sequence[int], *, common: Sequence[str], path: Path) -> None:
        self._methods, self._seeds, self._common, self._path = methods, seeds, common, path
        self._sources = training_sources()
        self._equal: set[tuple[str, ...]] = set()
        """Flags whose trials of other sources have the weights that the present sources compute."""

    def search_jobs(self) -> list[Job]:
        """The trials that choose between the alternatives of a method."""
        return [
            Job(method=method.name, flags=merged(self._common, method.flags, choice), seed=SEARCH_SEED)
            for method in self._methods
            for choice in method.choices
        ]

    def jobs(self) -> list[Job]:
        """The measured trials, seed by seed; a method whose alternatives are not tried yet has the first of them."""
        known = self.known()
        flags = {method.name: chosen_flags(method, self._common, known) for method in self._methods}
        return [Job(method=name, flags=words, seed=seed) for seed in self._seeds for name, words in flags.items()]

    def known(self) -> dict[Key, Trial]:
        """The trials of the results file whose weights are those of the present sources."""
        return by_key(
            trial for trial in read_trials(self._path) if trial.sources == self._sources or trial.flags in self._equal
        )

    def unchecked(self) -> list[Trial]:
        """The newest of the missing trials of every method that other sources have run."""
        missing = {(job.flags, job.seed) for job in self.missing([*self.search_jobs(), *self.jobs()])}
        found = [one for one in read_trials(self._path) if (one.flags, one.seed) in missing and one.first_weights]
        return list({trial.flags: trial for trial in found}.values())

    def check(self, parallel: int, start: Start = start_run) -> None:
        """Repeat the first updates of the newest trial of every method that only other sources have run.

        The present sources repeat them. If they compute other weights, the sources of the trial repeat the updates too.
        """
        unchecked = self.unchecked()
        present = first_weights(unchecked, parallel, start, ROOT)
        same = [one for one in unchecked if present.get(one.flags) == one.first_weights]
        differing: dict[str, list[Trial]] = {}
        for one in unchecked:
            if one not in same and one.flags in present:
                differing.setdefault(one.fingerprint.commit.rstrip("+"), []).append(one)
        for commit, trials in differing.items():
            earlier = weights_of_commit(commit, trials, parallel, start)
            same += [one for one in trials if present[one.flags] == earlier.get(one.flags)]
        self._equal |= {one.flags for one in same}
        for one in unchecked:
            found = "same weights" if one in same else "other weights, its trials are repeated"
            sys.stderr.write(f"bench: {one.method}, run with other sources: {found}\n")

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs without a trial, each once: methods with equal flags share their trials."""
        known = self.known()
        return list({(job.flags, job.seed): job for job in jobs if (job.flags, job.seed) not in known}.values())

    def describe(self, parallel: int) -> str:
        """The missing trials, one per line, and the time that they will take."""
        jobs = self.missing([*self.search_jobs(), *self.jobs()])
        lines = [f"{job.method}, seed {job.seed}: {' '.join(['python pipeline.py', *job.arguments])}" for job in jobs]
        counted = f"{len(jobs)} runs, {_duration(self._left(jobs, parallel))}"
        if unchecked := len(self.unchecked()):
            counted += f"; fewer if {unchecked} methods that other sources have run still compute the same weights"
        return "\n".join([*lines, f"{counted}\n"])

    def run(self, parallel: int, start: Start = start_run) -> bool:
        """Run the missing trials. Returns whether every run had an update."""
        complete = True
        self.check(parallel, start)
        for jobs in (self.search_jobs, self.jobs):
            missing = self.missing(jobs())
            for done, (job, trial) in enumerate(run_side_by_side(missing, parallel, self._sources, start), start=1):
                complete = complete and trial is not None
                if trial is not None:
                    append(self._path, trial)
                left = _duration(self._left(missing[done:], parallel))
                sys.stderr.write(f"bench: {done} of {len(missing)} runs, {left}: {_line(job, trial)}\n")
        return complete

    def _left(self, jobs: Sequence[Job], parallel: int) -> float:
        """Estimated seconds of jobs: the mean of the trials with equal flags, or of all trials; NaN without any."""
        known = read_trials(self._path)
        if not known:
            return math.nan
        mean = statistics.mean(trial.elapsed for trial in known)
        expected = [statistics.mean([t.elapsed for t in known if t.flags == job.flags] or [mean]) for job in jobs]
        return sum(expected) / parallel


def first_weights(
    trials: Sequence[Trial], parallel: int, start: Start, root: Path
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The hashes of the weights after each of the first updates, by the flags of the trial. root: of the sources.

    Trials whose run ended before its first update are left out.
    """
    jobs = {Job(method=one.method, flags=merged(one.flags, CHECK), seed=one.seed): one.flags for one in trials}
    ended = run_side_by_side(list(jobs), parallel, training_sources(root), start, root)
    return {jobs[job]: trial.first_weights for job, trial in ended if trial is not None}


def weights_of_commit(
    commit: str, trials: Sequence[Trial], parallel: int, start: Start
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """`first_weights` with the sources of a commit; without trials that had uncommitted changes.

    Returns an empty dictionary without git, or if this clone does not have the commit.
    """
    try:
        with working_tree(commit) as root:
            sources = training_sources(root)
            return first_weights([one for one in trials if one.sources == sources], parallel, start, root)
    except (OSError, subprocess.CalledProcessError):
        return {}


def run_side_by_side(
    jobs: Sequence[Job], parallel: int, sources: str, start: Start = start_run, root: Path = ROOT
) -> Iterator[tuple[Job, Trial | None]]:
    """Run jobs, `parallel` at the same time, and yield each when it has ended; None: it ended before its first update.

    root: of the sources. Runs that have not ended when the iterator is closed are killed.
    """
    waiting, here = list(reversed(jobs)), fingerprint()
    running: list[tuple[Job, PipelineRun]] = []
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop()
                running.append((job, start(job.arguments, root)))
            for one in [one for one in running if one[1].ended()]:
                running.remove(one)
                yield one[0], _trial(*one, parallel, sources, here)
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for _, run in running:
            run.close()


def _trial(job: Job, run: PipelineRun, parallel: int, sources: str, here: Fingerprint) -> Trial | None:
    try:
        record = run.record()
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"bench: {job.method}, seed {job.seed}: exit status {error.returncode} without an update\n")
        return None
    finally:
        run.close()
    return summarise(job, record, parallel, sources, here)


def summarise(job: Job, record: Record, parallel: int, sources: str, here: Fingerprint) -> Trial:
    """Read the results of a run from its files."""
    steps, began, completions = record.metrics, training_began(record.metrics), {0: 0}
    group_size = record.profile["sampling"]["group_size"]
    for line in steps:
        ended = line["groups/trained"] + line["groups/discarded"]
        completions[line["step"]] = max(completions.values()) + ended * group_size
    seconds = {line["step"]: line["time/run"] - began for line in steps}
    return Trial(
        method=job.method,
        flags=job.flags,
        seed=job.seed,
        curve=tuple(
            Point(step, seconds.get(step, 0.0), completions.get(step, 0), line["accuracy"])
            for step, line in ((line["step"], line) for line in record.evaluations)
        ),
        updates=steps[-1]["policy_version"],
        rollouts=max(completions.values()),
        tokens=sum(line["completion_length/total"] for line in steps),
        seconds=steps[-1]["time/run"] - began,
        elapsed=record.elapsed,
        cpu_seconds=record.cpu_seconds,
        peak_bytes=max(line["peak_memory_bytes"] for line in steps),
        status=record.status,
        side_by_side=parallel,
        sources=sources,
        first_weights=tuple(line["weights_hash"] for line in steps[:CHECKED_UPDATES]),
        pass_at={k: found["value"] for k, found in record.evaluations[-1].get("pass_at", {}).items()},
        command=shlex.join(["python", "pipeline.py", *job.arguments]),
        fingerprint=here,
    )


def merged(*flags: Sequence[str] | str) -> tuple[str, ...]:
    """Flags with their values; a later value of a flag replaces the earlier one. Every flag has one value."""
    found: dict[str, str] = {}
    for words in (shlex.split(part) if isinstance(part, str) else part for part in flags):
        found |= dict(zip(words[::2], words[1::2], strict=True))
    return tuple(word for flag in found.items() for word in flag)


def chosen_flags(method: Method, common: Sequence[str], trials: Mapping[Key, Trial]) -> tuple[str, ...]:
    """The flags of the measured trials of a method: the choice with the highest accuracy, then mean accuracy."""
    if not method.choices:
        return merged(common, method.flags)

    def rank(flags: tuple[str, ...]) -> tuple[float, float]:
        trial = trials.get((flags, SEARCH_SEED))
        return (trial.after, trial.average) if trial else (-1.0, -1.0)

    return max((merged(common, method.flags, choice) for choice in method.choices), key=rank)


def outcomes(methods: Sequence[Method], common: Sequence[str], path: Path) -> list[Outcome]:
    """The methods that have trials in a results file, whatever the sources that they were measured with."""
    known = by_key(read_trials(path))
    found = []
    for method in methods:
        flags = chosen_flags(method, common, known)
        mine = [trial for (words, seed), trial in known.items() if words == flags and seed != SEARCH_SEED]
        if mine:
            found.append(Outcome(method=method, trials=tuple(sorted(mine, key=lambda trial: trial.seed))))
    return found


def read_trials(path: Path) -> list[Trial]:
    """Read all trials of a results file; an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Trial) for line in path.read_bytes().splitlines()]


def append(path: Path, trial: Trial) -> None:
    """Add a trial to a results file; an earlier trial of equal flags and seed stays in it and no longer counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(trial) + b"\n")


def by_key(trials: Iterator[Trial] | Sequence[Trial]) -> dict[Key, Trial]:
    """Trials by flags and seed; the last one counts."""
    return {(trial.flags, trial.seed): trial for trial in trials}


def _line(job: Job, trial: Trial | None) -> str:
    found = "no update" if trial is None else f"{trial.before:.3f} -> {trial.after:.3f} in {trial.seconds:.0f} s"
    return f"{job.method}, seed {job.seed}: {found}"


def _duration(seconds: float) -> str:
    """Describe the remaining time."""
    if math.isnan(seconds):
        return "time left unknown"
    return f"about {seconds / 3600:.1f} h left" if seconds >= 5400 else f"about {seconds / 60:.0f} min left"
