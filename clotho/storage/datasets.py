"""Problems from a file: JSON lines, or one JSON list. What cannot be used is refused with file and line.

Which problem a group asks: a pure function of the run's seed and the group's number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from clotho.config.nearest import nearest
from protocols.errors import DatasetError
from protocols.prompt import Problem, derive


class Columns(Struct, frozen=True, kw_only=True):
    """Which keys of a record hold what. default_type: where a record names no type."""

    prompt: str = "prompt"
    answer: str = "answer"
    type: str = "type"
    default_type: str = "problem"


class HeldOutSplit(Struct, frozen=True, kw_only=True):
    """Problems to train on, and problems that are never trained on."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]


def load_problems(path: str | Path, *, columns: Columns) -> list[Problem]:
    """Read every problem of a file, in its order.

    Blank lines and a byte order mark are skipped; answers that are numbers or truth values become text, as JSON writes
    them. Raises `DatasetError` naming file and line (in a JSON list: the item) of the first record that cannot be used,
    and for a file that is missing, unreadable or empty.
    """
    path = Path(path).expanduser()
    try:
        contents = path.read_bytes()
    except FileNotFoundError as error:
        raise DatasetError(f"dataset {path} does not exist") from error
    except OSError as error:
        raise DatasetError(f"dataset {path} cannot be read: {error.strerror or error}") from error
    problems = [_problem(record, columns, where) for where, record in _records(path, contents)]
    if not problems:
        raise DatasetError(f"dataset {path} is empty")
    return problems


def split_heldout(problems: Sequence[Problem], fraction: float, seed: int) -> HeldOutSplit:
    """Set `fraction` of the problems aside, rounded up, chosen by `seed`; both parts keep the file's order.

    Raises `DatasetError` if a part that is asked for would be empty.
    """
    count = math.ceil(len(problems) * fraction)
    if count >= len(problems):
        raise DatasetError(
            f"{len(problems)} problems are too few to set {fraction:g} of them aside: lower data.heldout_fraction, "
            "or name a file in data.heldout"
        )
    order = np.random.default_rng(derive(seed, "heldout")).permutation(len(problems))
    aside = set(order[:count].tolist())
    return HeldOutSplit(
        train=tuple(problem for index, problem in enumerate(problems) if index not in aside),
        heldout=tuple(problem for index, problem in enumerate(problems) if index in aside),
    )


def _records(path: Path, contents: bytes) -> Iterator[tuple[str, Any]]:
    text = contents.removeprefix(b"\xef\xbb\xbf")
    if text.lstrip().startswith(b"["):
        try:
            items = msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DatasetError(f"dataset {path} begins like a JSON list and is none: {error}") from error
        yield from ((f"{path}: item {number}", item) for number, item in enumerate(items, start=1))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DatasetError(f"{path}:{number}: not JSON: {error}") from error


def _problem(record: Any, columns: Columns, where: str) -> Problem:
    if not isinstance(record, dict):
        raise DatasetError(f"{where}: a JSON object is expected, not {_kind(record)}")
    prompt = _required(record, columns.prompt, "prompt", where)
    if not isinstance(prompt, str):
        raise DatasetError(f"{where}: {columns.prompt} must be text (no chat messages), not {_kind(prompt)}")
    if not prompt.strip():
        raise DatasetError(f"{where}: {columns.prompt} is empty")
    answer = _required(record, columns.answer, "answer", where)
    kind = record.get(columns.type, columns.default_type)
    if not isinstance(kind, str) or not kind:
        raise DatasetError(f"{where}: {columns.type} must be text, not {_kind(kind)}")
    return Problem(prompt=prompt, answer=_text(answer, columns.answer, where), type=kind)


def _required(record: dict[str, Any], key: str, role: str, where: str) -> Any:
    if key in record:
        return record[key]
    close = nearest(key, record)
    hint = f"; did you mean data.{role}_key = {close!r}?" if close else f"; name the column in data.{role}_key"
    raise DatasetError(f"{where}: no key {key!r}, only {', '.join(map(repr, record)) or 'none'}{hint}")


def _text(answer: Any, key: str, where: str) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bool | int | float):
        return msgspec.json.encode(answer).decode()
    raise DatasetError(f"{where}: {key} must be text or a number, not {_kind(answer)}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a truth value"}
    return names.get(type(value), "a number")


class ProblemOrder:
    """Every problem once per epoch; the order of an epoch depends on (seed, epoch) alone."""

    def __init__(self, problems: int, *, seed: int, shuffle: bool) -> None:
        """problems: how many there are, at least one. shuffle: otherwise every epoch follows the file."""
        if problems < 1:
            raise ValueError("there must be at least one problem")
        self._problems = problems
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._permutation)

    def index(self, group_id: int) -> int:
        """Position, in the dataset, of the problem that group `group_id` (from 0) asks."""
        epoch, position = divmod(group_id, self._problems)
        return int(self._order(epoch)[position]) if self._shuffle else position

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(derive(self._seed, "epoch", epoch)).permutation(self._problems)
