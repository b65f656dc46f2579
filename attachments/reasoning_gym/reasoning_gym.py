"""Problems of Reasoning Gym, generated in child processes at the start of a run.

A dataset is generated in blocks of `BLOCK` problems. The seed of a block is derived from the seed of the run, the name
of the dataset and the number of the block, so that the problems depend neither on the number of processes nor on the
other datasets. A problem whose prompt occurred before is dropped.

All problems exist before the first step: the split, the rendered prompts, the removal of long ones and the fingerprint
of the problems need them. `size` bounds the time. Half of the datasets generate 10,000 problems in about a
second; further processes share the work if it takes longer.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import IO

import msgspec
import structlog

from attachments.reasoning_gym.gym_library import BLOCK_SECONDS, BOOT, INSTALL, Entry, Generated, Job, JobRefused
from attachments.reasoning_gym.sections import GYM, TABLES, GymSection, gym_names
from protocols.errors import DatasetError, visible
from protocols.prompt import Problem
from protocols.sampling import derive
from training_run.profile.data import DataSection
from training_run.profile.generators import Generate

log = structlog.get_logger(__name__)

BLOCK = 100
"""Number of problems of a block."""

ROUNDS = 4
"""How often missing problems are generated again; a dataset with few different prompts has fewer than `size`."""

GROW_SECONDS = 4.0
"""Time after which another process starts, as long as blocks wait."""

ORIGIN = "reasoning_gym"
"""Column of a problem with what creates its dataset: the name, the level and the settings."""


def gym_problems(
    data: DataSection,
    processes: GymProcesses,
    path: str,
    *,
    seed: int,
    part: str = "train",
    excluded: Iterable[str] = (),
) -> list[Problem]:
    """Generate the problems of `reasoning_gym:NAME,NAME`.

    part: `train` or `heldout`; problems of different parts have different seeds. excluded: prompts that no problem may
    have. Raises DatasetError.
    """
    sections = sections_of(data, path)
    if find_spec("reasoning_gym") is None:
        raise DatasetError(f"{visible(path, 200)} needs the library reasoning-gym: {INSTALL}")
    tables = {table.label: number for number, table in enumerate(TABLES.of(data))}
    pools = [_Pool(section, derive(seed, ORIGIN, part, section.label), {*excluded}) for section in sections]
    for _ in range(ROUNDS):
        jobs = [(pool, job) for pool in pools for job in pool.jobs()]
        for (pool, _job), found in zip(jobs, processes.answers([job for _, job in jobs]), strict=True):
            if isinstance(found, JobRefused):
                raise DatasetError(_located(found, pool.section, tables, path))
            pool.add(found.entries)
    for pool in pools:
        if not pool.entries:
            raise DatasetError(f"{pool.section.label} of Reasoning Gym has no problem with a new prompt")
        if len(pool.entries) < pool.section.size:
            log.warning(
                "fewer_problems_than_requested",
                key="data.reasoning_gym.size",
                dataset=pool.section.label,
                requested=pool.section.size,
                available=len(pool.entries),
            )
    return [_problem(pool.section, entry) for pool in pools for entry in pool.entries]


def sections_of(data: DataSection, path: str) -> list[GymSection]:
    """Return the table of each dataset in `reasoning_gym:NAME,NAME`, or its defaults. Raises DatasetError."""
    tables = {table.label: table for table in TABLES.of(data)}
    names = gym_names(path)
    if "" in names or len(set(names)) < len(names):
        raise DatasetError(f"{visible(path, 200)!r} must be {GYM}NAME,NAME with different names of datasets")
    return [tables.get(name) or GymSection(dataset=name) for name in names]


def epoch_weights(data: DataSection, problems: Sequence[Problem]) -> Mapping[str, float]:
    """Return the weight of each type of problem in an epoch, as `ProblemOrder` reads it.

    Datasets of Reasoning Gym have places in proportion to their weights, and no problem occurs twice in an epoch:
    the largest scale with places <= problems for every dataset. `data.type_weights` multiplies these weights.
    """
    counts = Counter(problem.type for problem in problems)
    shares = {section.label: section.weight for section in sections_of(data, data.train) if counts[section.label]}
    scale = min((counts[name] / share for name, share in shares.items()), default=0.0)
    own = {name: share * scale / counts[name] for name, share in shares.items()}
    return {**data.type_weights, **{name: weight * data.type_weights.get(name, 1.0) for name, weight in own.items()}}


def _problem(section: GymSection, entry: Entry) -> Problem:
    origin = {
        "dataset": section.dataset,
        "level": section.level,
        "settings": section.settings,
        "literal": entry.literal,
    }
    return Problem(
        prompt=entry.question,
        answer=entry.answer or "",
        type=section.label,
        extra={"question": entry.question, "answer": entry.answer, "metadata": entry.metadata, ORIGIN: origin},
    )


def _located(refused: JobRefused, section: GymSection, tables: Mapping[str, int], path: str) -> str:
    """The message with the key that is wrong."""
    number = tables.get(section.label)
    if number is None:
        return f"{visible(path, 200)}: {refused.message}"
    return f"data.reasoning_gym[{number}]{refused.key and '.'}{refused.key}: {refused.message}"


class _Pool:
    """The problems of one dataset so far. seen: prompts that no further problem may have."""

    def __init__(self, section: GymSection, seed: int, seen: set[str]) -> None:
        self.section, self.entries = section, list[Entry]()
        self._seed, self._seen, self._blocks, self._exhausted = seed, seen, 0, False

    def jobs(self) -> list[Job]:
        """Return the next blocks, as many as problems are missing; none if the last ones had no new prompt."""
        missing = 0 if self._exhausted else self.section.size - len(self.entries)
        self._exhausted = True
        jobs = []
        for start in range(0, missing, BLOCK):
            jobs.append(
                Job(
                    dataset=self.section.dataset,
                    settings=self.section.settings,
                    level=self.section.level,
                    seed=derive(self._seed, "block", self._blocks) % 2**31,
                    size=BLOCK,
                    count=min(BLOCK, missing - start) if self._blocks * BLOCK < self.section.size else BLOCK,
                )
            )
            self._blocks += 1
        return jobs

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the problems with new prompts, up to the size of the dataset."""
        for entry in entries:
            if entry.question not in self._seen and len(self.entries) < self.section.size:
                self._seen.add(entry.question)
                self.entries.append(entry)
                self._exhausted = False


@contextmanager
def opened(data: DataSection) -> Iterator[Generate]:
    """Return what generates the problems of a profile, in processes that end with the context."""
    with GymProcesses() as processes:
        yield partial(gym_problems, data, processes)


class GymProcesses:
    """Processes that generate problems. The first one starts with the first job, further ones while jobs wait."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._idle: list[subprocess.Popen[bytes]] = []
        self._errors: dict[int, IO[bytes]] = {}

    def __enter__(self) -> GymProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def answers(self, jobs: Sequence[Job]) -> list[Generated | JobRefused]:
        """Return the answer to each job, in order. Raises DatasetError if a process ends or takes too long."""
        waiting, found = deque(range(len(jobs))), dict[int, Generated | JobRefused]()
        busy: dict[subprocess.Popen[bytes], tuple[int, float]] = {}
        grown = time.monotonic()
        while len(found) < len(jobs):
            now = time.monotonic()
            may_grow = len(self._errors) < (os.cpu_count() or 1) and now - grown > GROW_SECONDS
            if waiting and not self._idle and (may_grow or not busy):
                self._idle.append(self._start())
                grown = now
            while waiting and self._idle:
                process, number = self._idle.pop(), waiting.popleft()
                self._send(process, jobs[number])
                busy[process] = number, now
            for key, _ in self._selector.select(timeout=GROW_SECONDS):
                process = key.data
                number, _since = busy.pop(process)
                found[number] = self._receive(process, jobs[number])
                self._idle.append(process)
            for number, since in busy.values():
                if now - since > BLOCK_SECONDS:
                    raise DatasetError(
                        f"{jobs[number].dataset} of Reasoning Gym generated less than {BLOCK} problems in "
                        f"{BLOCK_SECONDS:g} s: choose easier settings in data.reasoning_gym"
                    )
        return [found[number] for number in range(len(jobs))]

    def _start(self) -> subprocess.Popen[bytes]:
        errors = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (the stack closes it)
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # The order of sets of text depends on the hash seed, and some generators depend on that order.
            env={**os.environ, "PYTHONHASHSEED": "0", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
        )
        self._stack.callback(_end, process)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, process)
        self._errors[process.pid] = errors
        return process

    def _send(self, process: subprocess.Popen[bytes], job: Job) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # the process ended; reading its answer reports that
            return

    def _receive(self, process: subprocess.Popen[bytes], job: Job) -> Generated | JobRefused:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            return msgspec.json.decode(line, type=Generated | JobRefused)
        except ValueError as error:
            process.kill()
            status = process.wait()
            self._errors[process.pid].seek(0)
            said = self._errors[process.pid].read().decode(errors="replace").strip().rpartition("\n")[2]
            raise DatasetError(
                f"{job.dataset} of Reasoning Gym: the process that generates problems ended with status {status}: "
                f"{visible(said, 200)}"
            ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, which has nothing to lose, and close its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
    process.wait()
