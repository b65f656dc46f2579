"""Order of problems: the held-out split, and the problem of every group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from protocols.errors import DatasetError
from protocols.prompt import Problem
from protocols.sampling import derive


class HeldOutSplit(Struct, frozen=True, kw_only=True):
    """Problems for training, and held-out problems, which are never trained on."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]


def split_heldout(problems: Sequence[Problem], fraction: float, seed: int) -> HeldOutSplit:
    """Hold out `fraction` of the problems, rounded up, chosen by `seed`; both parts keep the order of the file.

    Raises DatasetError if no problem would remain for training.
    """
    count = math.ceil(len(problems) * fraction)
    if count >= len(problems):
        raise DatasetError(
            f"{len(problems)} problems are too few to hold out the fraction {fraction:g}: lower data.heldout_fraction "
            "(0: no evaluation), or name a file in data.heldout"
        )
    order = np.random.default_rng(derive(seed, "heldout")).permutation(len(problems))
    held_out = set(order[:count].tolist())
    return HeldOutSplit(
        train=tuple(problem for index, problem in enumerate(problems) if index not in held_out),
        heldout=tuple(problem for index, problem in enumerate(problems) if index in held_out),
    )


class ProblemOrder:
    """Maps group ids to problems in an order that depends only on (seed, epoch).

    An epoch contains every problem once. With weights, a type of `n` problems and weight `w` has round(n w) places in
    every epoch: weight 2 repeats each of its problems, and weight 0.5 takes one half in one epoch and the other half in
    the next.
    """

    def __init__(self, types: Sequence[str], *, weights: Mapping[str, float], seed: int, shuffle: bool) -> None:
        """types: type of each problem, at least one. shuffle: if false, an epoch has the order of the file.

        Raises DatasetError for a weight of a type that no problem has, and if no problem has a place in an epoch.
        """
        if not types:
            raise ValueError("types must name at least one problem")
        self._seed, self._shuffle = seed, shuffle
        of_type: dict[str, list[int]] = {}
        for index, kind in enumerate(types):
            of_type.setdefault(kind, []).append(index)
        self._types = {kind: np.array(indices) for kind, indices in of_type.items()}
        if missing := [kind for kind in weights if kind not in self._types]:
            there = ", ".join(sorted(self._types)[:10])
            raise DatasetError(f"data.type_weights: no problem has the type {missing[0]!r}; there are: {there}")
        self._places = {kind: round(len(found) * weights.get(kind, 1.0)) for kind, found in self._types.items()}
        self._length = sum(self._places.values())
        if not self._length:
            raise DatasetError("data.type_weights leaves no problem to train on: raise a weight")
        self._order = lru_cache(maxsize=2)(self._epoch)

    @property
    def epoch_length(self) -> int:
        """Number of groups of an epoch."""
        return self._length

    def index(self, group_id: int) -> int:
        """Return the index of the problem of group `group_id` (from 0)."""
        epoch, position = divmod(group_id, self._length)
        return int(self._order(epoch)[position])

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        chosen = np.sort(np.concatenate([self._chosen(kind, epoch) for kind in self._types]))
        if not self._shuffle:
            return chosen
        order: npt.NDArray[np.int64] = chosen[
            np.random.default_rng(derive(self._seed, "epoch", epoch)).permutation(self._length)
        ]
        return order

    def _chosen(self, kind: str, epoch: int) -> npt.NDArray[np.int64]:
        """The problems of a type in an epoch: the next places of an endless repetition of all its problems."""
        problems, places = self._types[kind], self._places[kind]
        if places != len(problems) and self._shuffle:
            problems = problems[np.random.default_rng(derive(self._seed, "type", kind)).permutation(len(problems))]
        chosen: npt.NDArray[np.int64] = problems[np.arange(epoch * places, (epoch + 1) * places) % len(problems)]
        return chosen
