"""Problems that an attachment generates: datasets whose names begin with a prefix of the table of generators."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from msgspec import Struct

from clotho.extension import TableDoor, provided
from protocols.errors import DatasetError, visible
from protocols.prompt import Problem
from training_run.profile.data import DataSection


class Generate(Protocol):
    """Generates the problems of a dataset, in the order of their numbers."""

    def __call__(
        self, path: str, *, seed: int, part: str = "train", excluded: Collection[str] = ()
    ) -> Sequence[Problem]:
        """Return the problems of `path`. part: `train` or `heldout`. excluded: prompts that no problem may have.

        Raises DatasetError.
        """


class Generator(Struct, frozen=True, kw_only=True):
    """A source of generated problems; the key is the prefix of its datasets, such as `reasoning_gym:`.

    open: called with `[data]`, returns a context manager of a `Generate`. weights:
    called with `[data]` and the problems, returns the weight of each type in an epoch. rewards: `[[rewards]]` of a
    profile that lists none.
    """

    open: str
    weights: str
    rewards: tuple[Mapping[str, Any], ...] = ()


GENERATORS: TableDoor[Generator] = TableDoor(
    "attachment.GENERATORS", {"reasoning_gym:": "reasoning_gym", "verifiers:": "verifiers"}
)
"""Sources of generated problems, by the prefix of their datasets."""


def prefix_of(dataset: object) -> str:
    """Return the prefix of a dataset that is generated, also if its attachment is missing; empty for other values."""
    prefix = f"{dataset.partition(':')[0]}:" if isinstance(dataset, str) else ""
    return prefix if prefix in GENERATORS.owners else ""


def rewards_of(dataset: object) -> Sequence[Mapping[str, Any]]:
    """Return the `[[rewards]]` of a dataset that is generated, for profiles that list none."""
    row = GENERATORS().get(prefix_of(dataset))
    return row.rewards if row else ()


def epoch_weights(data: DataSection, problems: Sequence[Problem]) -> Mapping[str, float]:
    """Return the weight of each type of problem in an epoch, as `ProblemOrder` reads it. Raises DatasetError."""
    if not prefix_of(data.train):
        return data.type_weights
    found: Mapping[str, float] = provided(_row(data.train).weights)(data, problems)
    return found


class Generators:
    """What generates the problems of a profile, opened when a dataset needs it, until the end of the context."""

    def __init__(self, data: DataSection) -> None:
        self._data, self._stack = data, ExitStack()
        self._opened: dict[str, Generate] = {}

    def __enter__(self) -> Generators:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def problems(self, path: str, *, seed: int, part: str = "train", excluded: Collection[str] = ()) -> list[Problem]:
        """Generate the problems of a dataset, see `Generate`. Raises DatasetError."""
        row, prefix = _row(path), prefix_of(path)
        if prefix not in self._opened:
            self._opened[prefix] = self._stack.enter_context(provided(row.open)(self._data))
        return list(self._opened[prefix](path, seed=seed, part=part, excluded=excluded))


def _row(path: str) -> Generator:
    """Return what generates a dataset. Raises DatasetError if its attachment is missing."""
    prefix = prefix_of(path)
    row = GENERATORS().get(prefix)
    if row is None:
        raise DatasetError(f"{visible(path, 200)} {GENERATORS.absence(prefix)}")
    return row
