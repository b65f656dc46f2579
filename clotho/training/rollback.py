"""The last good policy: what a run that collapses goes back to.

What learning carries from update to update beside the parameters, by name, as a checkpoint keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.config.schema import LearnerSection
from clotho.models.parameters import Arrays, Parameters, flat, nested
from clotho.training import optimizers
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizers import OptimizerState

NUMBERS = "numbers"
"""Name of the array that holds the plain numbers of the state, as the bits of float64."""


class LearnerState(NamedTuple):
    """Optimizer, controllers, and counters.

    loss_coefficients: of KL penalty and entropy bonus in the next update. rate_factor: of the learning rate, below 1 after a
    rollback. updates: applied so far.
    """

    optimizer: OptimizerState
    loss_coefficients: LossCoefficients
    rate_factor: float = 1.0
    updates: int = 0


def state_arrays(state: LearnerState) -> Arrays:
    """Name every array of the state: `optimizer.NAME` as the optimizer names them, and `numbers`."""
    plain = np.array([*state.loss_coefficients, state.rate_factor, state.updates], dtype=np.float64)
    named = {f"optimizer.{name}": array for name, array in optimizers.state_arrays(state.optimizer).items()}
    return named | {NUMBERS: mx.array(plain.view(np.uint32))}


def state_from_arrays(arrays: Mapping[str, mx.array], parameters: Arrays, settings: LearnerSection) -> LearnerState:
    """Rebuild the state that `state_arrays` named, bit for bit. Raises ValueError where it does not fit.

    parameters: the trainable parameters that the state belongs to.
    """
    if NUMBERS not in arrays:
        raise ValueError(f"the learner's state does not fit: {NUMBERS} is missing")
    kl_beta, entropy_weight, rate_factor, updates = np.array(arrays[NUMBERS]).view(np.float64).tolist()
    optimizer = {name.removeprefix("optimizer."): array for name, array in arrays.items() if name != NUMBERS}
    return LearnerState(
        optimizer=optimizers.state_from_arrays(optimizer, parameters, settings),
        loss_coefficients=LossCoefficients(kl_beta, entropy_weight),
        rate_factor=rate_factor,
        updates=int(updates),
    )


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

    def restore(self, arrays: Mapping[str, mx.array], settings: LearnerSection) -> None:
        """Take back what `arrays` named. Raises ValueError where it does not fit."""
        start = flat(self._good.parameters)
        snapshots = []
        for which in KINDS:
            parameters = part(arrays, f"{which}.parameters.")
            if {n: a.shape for n, a in parameters.items()} != {n: a.shape for n, a in start.items()}:
                raise ValueError(f"the {which} policy of the checkpoint does not fit the trainable parameters")
            state = state_from_arrays(part(arrays, f"{which}.state."), start, settings)
            snapshots.append(Snapshot(nested(parameters), state, part(arrays, f"{which}.reference.")))
        self._healthy = int(np.array(arrays["healthy"]))
        self._good, self._candidate = snapshots


def part(arrays: Mapping[str, mx.array], prefix: str) -> Arrays:
    """The arrays whose names start with `prefix`, named without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
