"""Which problem a group asks: a pure function of the run's seed and the group's number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from protocols.seeds import derive


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
