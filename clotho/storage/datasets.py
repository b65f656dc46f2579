"""Datasets: problems from a JSON Lines file or a JSON list, the held-out split, and the order of problems."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from protocols.errors import DatasetError, nearest, visible
from protocols.prompt import Problem
from protocols.sampling import derive

MAX_BYTES = 4 * 2**30
MAX_LINE_BYTES = 32 * 2**20
MAX_KEYS = 1_000
"""Number of keys of a record."""

MAX_SHOWN_KEYS = 8
MAX_SHOWN_KEY = 40
"""Keys, and characters of a key, that an error message shows."""


class Columns(Struct, frozen=True, kw_only=True):
    """Keys of the records of a dataset. default_type: type of records without the key `type`."""

    prompt: str = "prompt"
    answer: str = "answer"
    type: str = "type"
    default_type: str = "problem"


class HeldOutSplit(Struct, frozen=True, kw_only=True):
    """Problems for training, and held-out problems, which are never trained on."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]


def load_problems(path: str | Path, *, columns: Columns) -> list[Problem]:
    """Read all problems of a file, in the order of the file.

    Blank lines and a byte order mark are ignored. Answers that are numbers or booleans become their JSON text. Raises
    DatasetError with file and line (in a JSON list: item) of the first invalid record, or if the file is missing,
    unreadable, empty, too large or not a regular file.
    """
    contents = _read(path)
    path = Path(path).expanduser()
    problems = [_problem(record, columns, where) for where, record in _records(path, contents)]
    if not problems:
        raise DatasetError(f"dataset {path} is empty")
    return problems


def split_heldout(problems: Sequence[Problem], fraction: float, seed: int) -> HeldOutSplit:
    """Hold out `fraction` of the problems, rounded up, chosen by `seed`; both parts keep the order of the file.

    Raises DatasetError if no problem would remain for training.
    """
    count = math.ceil(len(problems) * fraction)
    if count >= len(problems):
        raise DatasetError(
            f"{len(problems)} problems are too few to hold out the fraction {fraction:g}: lower data.heldout_fraction, "
            "or name a file in data.heldout"
        )
    order = np.random.default_rng(derive(seed, "heldout")).permutation(len(problems))
    held_out = set(order[:count].tolist())
    return HeldOutSplit(
        train=tuple(problem for index, problem in enumerate(problems) if index not in held_out),
        heldout=tuple(problem for index, problem in enumerate(problems) if index in held_out),
    )


class ProblemOrder:
    """Maps group ids to problems: every problem once per epoch, in an order that depends only on (seed, epoch)."""

    def __init__(self, problems: int, *, seed: int, shuffle: bool) -> None:
        """problems: number of problems, at least 1. shuffle: if false, every epoch has the order of the file."""
        if problems < 1:
            raise ValueError("problems must be at least 1")
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._permutation)

    def index(self, group_id: int) -> int:
        """Return the index of the problem of group `group_id` (from 0)."""
        epoch, position = divmod(group_id, self._problems)
        return int(self._order(epoch)[position]) if self._shuffle else position

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(derive(self._seed, "epoch", epoch)).permutation(self._problems)


def _read(name: str | Path) -> bytes:
    """Return the contents of a regular file. A pipe is not waited for, and a device is not read."""
    try:
        path = Path(name).expanduser()
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DatasetError(f"dataset {path} is not a regular file")
            if status.st_size > MAX_BYTES:
                raise DatasetError(f"dataset {path} has {status.st_size} bytes; at most {MAX_BYTES} are permitted")
            return file.read(MAX_BYTES)
    except FileNotFoundError as error:
        raise DatasetError(f"dataset {path} does not exist") from error
    except OSError as error:
        raise DatasetError(f"dataset {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:  # a NUL in the path, or the home of an unknown user
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"dataset {visible(str(name), 200)} cannot be read: {error}") from error


def _records(path: Path, contents: bytes) -> Iterator[tuple[str, Any]]:
    text = contents.removeprefix(b"\xef\xbb\xbf")
    if text.lstrip().startswith(b"["):
        try:
            items = msgspec.json.decode(text)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"dataset {path} starts like a JSON list but is not valid: {error}") from error
        yield from ((f"{path}: item {number}", item) for number, item in enumerate(items, start=1))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_LINE_BYTES:
            raise DatasetError(f"{path}:{number}: has {len(line)} bytes; at most {MAX_LINE_BYTES} are permitted")
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{path}:{number}: not valid JSON: {error}") from error


def _problem(record: Any, columns: Columns, where: str) -> Problem:
    if not isinstance(record, dict):
        raise DatasetError(f"{where}: must be a JSON object, not {_kind(record)}")
    if len(record) > MAX_KEYS:
        raise DatasetError(f"{where}: has {len(record)} keys; at most {MAX_KEYS} are permitted")
    prompt = _required(record, columns.prompt, "prompt", where)
    if not isinstance(prompt, str):
        raise DatasetError(f"{where}: {columns.prompt} must be text (not chat messages), not {_kind(prompt)}")
    if not prompt.strip():
        raise DatasetError(f"{where}: {columns.prompt} is empty")
    answer = _required(record, columns.answer, "answer", where)
    problem_type = record.get(columns.type, columns.default_type)
    if not isinstance(problem_type, str) or not problem_type:
        raise DatasetError(f"{where}: {columns.type} must be text that is not empty, not {_kind(problem_type)}")
    return Problem(prompt=prompt, answer=_text(answer, columns.answer, where), type=problem_type)


def _required(record: dict[str, Any], key: str, column: str, where: str) -> Any:
    if key in record:
        return record[key]
    close = nearest(key, [name for name in record if len(name) <= MAX_SHOWN_KEY])
    hint = f"; did you mean data.{column}_key = {close!r}?" if close else f"; set data.{column}_key"
    names = [repr(visible(name, MAX_SHOWN_KEY)) for name in islice(record, MAX_SHOWN_KEYS)]
    if len(record) > MAX_SHOWN_KEYS:
        names.append(f"and {len(record) - MAX_SHOWN_KEYS} more")
    raise DatasetError(f"{where}: no key {visible(key, MAX_SHOWN_KEY)!r}, only {', '.join(names) or 'none'}{hint}")


def _text(answer: Any, key: str, where: str) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, bool | float):
        return msgspec.json.encode(answer).decode()
    raise DatasetError(f"{where}: {key} must be text or a number, not {_kind(answer)}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")
