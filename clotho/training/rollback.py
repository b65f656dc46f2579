"""The last good policy: what a run that collapses goes back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.models.parameters import Parameters, flat, nested
from clotho.training.learner_state import LearnerState, state_arrays, state_from_arrays

Arrays = dict[str, mx.array]

KINDS = ("good", "candidate")


class Snapshot(NamedTuple):
    """A learner at one moment; its arrays are shared with whoever else holds them, for they never change.

    reference: parameters of the reference policy, as `ReferencePolicy.arrays` names them.
    """

    parameters: Parameters
    state: LearnerState
    reference: Arrays


class GoodPolicy:
    """Remembers a policy after which learning stayed healthy for a while.

    After every `window` healthy updates the candidate of last time becomes the good one, and the newest policy the
    candidate: what is gone back to has proved itself for `window` to 2 `window` updates. At first both are the start.
    """

    def __init__(self, start: Snapshot, *, window: int) -> None:
        self.window = window
        self._good = self._candidate = start
        self._healthy = 0

    def observe(self, newest: Snapshot, *, healthy: bool) -> None:
        """Tell it of one update and of how its batch looked; what does not look healthy is no proof of anything."""
        if not healthy:
            return
        self._healthy += 1
        if self._healthy % self.window == 0:
            self._good, self._candidate = self._candidate, newest

    def go_back(self) -> Snapshot:
        """Return the good policy, from which everything starts anew."""
        self._candidate = self._good
        self._healthy = 0
        return self._good

    def arrays(self) -> Arrays:
        """Name all of it for a checkpoint."""
        named = {"healthy": mx.array(self._healthy, dtype=mx.int32)}
        for kind, snapshot in zip(KINDS, (self._good, self._candidate), strict=True):
            named |= {f"{kind}.parameters.{name}": array for name, array in flat(snapshot.parameters).items()}
            named |= {f"{kind}.state.{name}": array for name, array in state_arrays(snapshot.state).items()}
            named |= {f"{kind}.reference.{name}": array for name, array in snapshot.reference.items()}
        return named

    def restore(self, arrays: Mapping[str, mx.array], *, kind: str) -> None:
        """Take back what `arrays` named; `kind` is the optimizer's. Raises ValueError where it does not fit."""
        start = flat(self._good.parameters)
        snapshots = []
        for which in KINDS:
            parameters = part(arrays, f"{which}.parameters.")
            if {n: a.shape for n, a in parameters.items()} != {n: a.shape for n, a in start.items()}:
                raise ValueError(f"the {which} policy of the checkpoint does not fit the trainable parameters")
            state = state_from_arrays(part(arrays, f"{which}.state."), start, kind=kind)
            snapshots.append(Snapshot(nested(parameters), state, part(arrays, f"{which}.reference.")))
        self._healthy = int(np.array(arrays["healthy"]))
        self._good, self._candidate = snapshots


def part(arrays: Mapping[str, mx.array], prefix: str) -> Arrays:
    """The arrays whose names start with `prefix`, named without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
