"""The library Reasoning Gym: datasets by name and settings, their problems, and the process that generates them.

The library imports matplotlib and sympy, and some of its generators use Python's global random state or depend on the
order of sets. Therefore the run never imports it: `reasoning_gym` starts processes with `python -c BOOT`, which
generate problems, and the worker processes of the reward `reasoning_gym` score answers.

A process reads one `Job` per line from its standard input and writes one `Generated` or `JobRefused` per line, as JSON.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib
import math
import os
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from protocols.errors import DatasetError, did_you_mean, error_text, visible

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from attachments.reasoning_gym.gym_library import main; main()"
)
"""Program of the process. The path must be set before the first import of the project."""

INSTALL = "pip install reasoning-gym"
"""The command that installs the library."""

OWN_FIELDS = ("seed", "size")
"""Fields of every configuration that the run sets."""

COMPOSITE = "composite"
"""A dataset of the library that mixes other datasets, as `data.reasoning_gym` does."""

BLOCK_SECONDS = 600.0
"""Time limit of a job."""

UNSCORED = "difficulty"
"""Key of the metadata that only describes the configuration."""

MAX_DEPTH = 64
"""Levels of the metadata of a problem."""


class Job(Struct, frozen=True, kw_only=True):
    """Run -> process. Generate the first `count` of the `size` problems of a dataset. settings, level: see `create`."""

    dataset: str
    settings: dict[str, Any]
    level: int | None
    seed: int
    size: int
    count: int


class Entry(Struct, frozen=True, kw_only=True):
    """A problem of the library.

    answer: an example of a correct answer; None if the dataset gives no example. metadata: as JSON values. literal: the
    metadata as a Python literal if they contain tuples, sets or keys of other types, which scorers compare; else empty.
    """

    question: str
    answer: str | None
    metadata: dict[str, Any]
    literal: str = ""


class Generated(Struct, frozen=True, kw_only=True, tag=True):
    """Process -> run. The problems of a job, in order."""

    entries: list[Entry]


class JobRefused(Struct, frozen=True, kw_only=True, tag=True):
    """Process -> run. The job cannot be done. key: of the table that is wrong, such as `settings`; empty: none."""

    message: str
    key: str = ""


class GymError(DatasetError):
    """A dataset of the library cannot be used. key: of the table that is wrong, such as `settings`; empty: none."""

    def __init__(self, message: str, *, key: str = "") -> None:
        """key: of the table `[[data.reasoning_gym]]`."""
        super().__init__(message)
        self.key = key


class Library(NamedTuple):
    """The registries of the library: class and configuration class of each dataset, and curricula."""

    datasets: Mapping[str, tuple[Any, Any]]
    curricula: Mapping[str, Any]


@lru_cache(maxsize=1)
def library() -> Library:
    """Import the library. Raises GymError if the library or a package that it needs is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of packages that Python compiles for the first time
            importlib.import_module("reasoning_gym")
            factory = importlib.import_module("reasoning_gym.factory")
    except Exception as error:
        reason = f"{type(error).__name__}: {error_text(error)}"
        raise GymError(f"the library reasoning-gym cannot be imported ({visible(reason, 200)}): {INSTALL}") from error
    return Library({k: v for k, v in factory.DATASETS.items() if k != COMPOSITE}, factory.CURRICULA)


def create(dataset: str, settings: Mapping[str, Any], level: int | None, *, seed: int = 0, size: int = 1) -> Any:
    """Create a dataset of the library.

    level: level of the dataset's curriculum; ranges extend from the lowest level to this one. None: the defaults of the
    configuration. settings: fields of the configuration, which replace those of the level. Raises GymError.
    """
    found = library()
    if dataset == COMPOSITE:
        raise GymError("the dataset composite mixes other datasets: name these in data.train, separated by commas")
    if dataset not in found.datasets:
        hint = did_you_mean(dataset, found.datasets) or f"; there are {len(found.datasets)}, for example chain_sum"
        raise GymError(f"there is no dataset {visible(dataset, 60)!r}{hint}", key="dataset")
    made, configuration = found.datasets[dataset]
    known = {field.name for field in fields(configuration)}
    values = {} if level is None else _of_level(dataset, level)
    for name, value in settings.items():
        if name in OWN_FIELDS:
            instead = "data.reasoning_gym has the key size" if name == "size" else "the seed of the run determines it"
            raise GymError(f"{dataset} takes no setting {name!r}: {instead}", key="settings")
        if name not in known:
            there = ", ".join(sorted(known - {*OWN_FIELDS}))
            hint = did_you_mean(name, known - {*OWN_FIELDS}) or f"; there are: {there or 'none'}"
            raise GymError(f"{dataset} has no setting {visible(name, 60)!r}{hint}", key="settings")
        values[name] = value
    try:
        plain = configuration(seed=seed, size=size)
        typed = {name: _like(getattr(plain, name), value) for name, value in values.items()}
        chosen = configuration(**typed, seed=seed, size=size)
        if hasattr(chosen, "validate"):
            chosen.validate()
        return made(config=chosen)
    except Exception as error:  # the library asserts, and compares values of wrong types
        key = "settings" if settings else "level" if level is not None else ""
        raise GymError(f"{dataset} refuses its configuration: {_reason(error)}", key=key) from error


def _like(default: object, value: object) -> object:
    """Return a value of a profile as a tuple or a member of an enumeration, if the default of its field is one."""
    if isinstance(value, list) and isinstance(default, tuple | list):
        parts = [_like(default[0], part) for part in value] if default else value
        return tuple(parts) if isinstance(default, tuple) else parts
    return type(default)(value) if isinstance(default, Enum) and not isinstance(value, Enum) else value


def _of_level(dataset: str, level: int) -> dict[str, Any]:
    """Return the fields of the configuration at a level of the dataset's curriculum."""
    curricula = library().curricula
    if dataset not in curricula:
        raise GymError(f"{dataset} has no curriculum, and thus no levels", key="level")
    curriculum = curricula[dataset]()
    highest = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
    if level > highest:
        raise GymError(f"{dataset} has the levels 0 to {highest}, not {level}", key="level")
    try:
        curriculum.set_global_level(level)
        configuration = curriculum.generate_configuration()
    except Exception as error:
        raise GymError(f"{dataset} has no level {level}: {_reason(error)}", key="level") from error
    names = [field.name for field in fields(configuration) if field.name not in OWN_FIELDS]
    return {name: getattr(configuration, name) for name in names}


def generate(job: Job) -> list[Entry]:
    """Generate the problems of a job.

    The problems depend on nothing but the job: generators that use a global random state find one that is derived from
    the seed. Raises GymError.
    """
    random.seed(job.seed)
    np.random.seed(job.seed)
    made = create(job.dataset, job.settings, job.level, seed=job.seed, size=job.size)
    entries: list[Entry] = []
    for index in range(job.count):
        try:
            entries.append(_entry(made, job.seed + index, index))
        except Exception as error:
            if isinstance(error, IndexError) and entries:  # the dataset has fewer problems than `size`
                break
            key = "settings" if job.settings else ""
            raise GymError(f"{job.dataset} cannot generate a problem: {_reason(error)}", key=key) from error
    return entries


def _entry(made: Any, seed: int, index: int) -> Entry:
    random.seed(seed)
    np.random.seed(seed)
    entry = made[index]
    answer, metadata = entry["answer"], entry.get("metadata") or {}
    plain = as_json(metadata)
    return Entry(
        question=str(entry["question"]),
        answer=None if answer is None else str(answer),
        metadata=plain,
        literal=_literal(metadata, plain),
    )


def _literal(metadata: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return metadata as a Python literal if it differs from the JSON values in more than `UNSCORED`."""
    try:
        if all(value == plain[str(key)] for key, value in metadata.items() if key != UNSCORED):
            return ""
        literal = repr(metadata)
        return literal if ast.literal_eval(literal) == metadata else ""
    except (
        ValueError,
        SyntaxError,
        TypeError,
        RecursionError,
        MemoryError,
    ):  # objects and arrays
        return ""


def score(made: Any, entry: Entry, answer: str) -> float:
    """Return the score that a dataset gives an answer."""
    metadata = ast.literal_eval(entry.literal) if entry.literal else entry.metadata
    found = made.score_answer(
        answer=answer, entry={"question": entry.question, "answer": entry.answer, "metadata": metadata}
    )
    return float(found)


def as_json(value: Any, depth: int = 0) -> Any:
    """Return metadata as JSON values: keys and unknown objects become text, tuples and sets become lists."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the value of an enumeration
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth > MAX_DEPTH:
        return str(value)
    if isinstance(value, dict):
        return {str(key): as_json(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(part, depth + 1) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return as_json(value.tolist(), depth + 1)
    return str(value)


def _reason(error: Exception) -> str:
    text = " ".join(error_text(error).split())
    return visible(text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}", 200)


def main() -> None:
    """Answer jobs until standard input ends. What the library prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin.buffer:
        faulthandler.dump_traceback_later(BLOCK_SECONDS, exit=True)  # also if the run has ended meanwhile
        job = msgspec.json.decode(line, type=Job)
        answer: Generated | JobRefused
        try:
            answer = Generated(entries=generate(job))
        except GymError as error:
            answer = JobRefused(message=str(error), key=error.key)
        faulthandler.cancel_dump_traceback_later()
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
