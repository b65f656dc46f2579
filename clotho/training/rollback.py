"""The learner's state beside the parameters, and the last healthy policy to which a collapsing run returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.config.sections_training import LearnerSection
from clotho.models.parameters import Arrays, Parameters, flat, nested
from clotho.training import optimizers
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizers import OptimizerState

SCALARS = "scalars"
"""Name of the array that holds the scalars of the state, as the bits of float64."""


class LearnerState(NamedTuple):
    """What the learner carries from update to update besides the parameters.

    loss_coefficients: of the KL penalty and the entropy bonus in the next update. rate_factor: factor of the learning
    rate, below 1 after a rollback. updates: number of updates applied.
    """

    optimizer: OptimizerState
    loss_coefficients: LossCoefficients
    rate_factor: float = 1.0
    updates: int = 0


def state_arrays(state: LearnerState) -> Arrays:
    """Name every array of the state: `optimizer.NAME` with the names of the optimizer's state, and `scalars`."""
    scalars = np.array([*state.loss_coefficients, state.rate_factor, state.updates], dtype=np.float64)
    named = {f"optimizer.{name}": array for name, array in optimizers.state_arrays(state.optimizer).items()}
    return named | {SCALARS: mx.array(scalars.view(np.uint32))}


def state_from_arrays(arrays: Mapping[str, mx.array], parameters: Arrays, settings: LearnerSection) -> LearnerState:
    """Rebuild the state that `state_arrays` named, bit for bit.

    parameters: the trainable parameters that the state belongs to. Raises ValueError if it does not fit them.
    """
    if SCALARS not in arrays:
        raise ValueError(f"the learner's state does not fit: {SCALARS} is missing")
    kl_beta, entropy_coef, rate_factor, updates = np.array(arrays[SCALARS]).view(np.float64).tolist()
    optimizer = {name.removeprefix("optimizer."): array for name, array in arrays.items() if name != SCALARS}
    return LearnerState(
        optimizer=optimizers.state_from_arrays(optimizer, parameters, settings),
        loss_coefficients=LossCoefficients(kl_beta, entropy_coef),
        rate_factor=rate_factor,
        updates=int(updates),
    )


SNAPSHOTS = ("healthy", "candidate")


class Snapshot(NamedTuple):
    """The learner at one moment. The arrays are shared with other holders, because arrays never change.

    reference: parameters of the reference policy, as `ReferencePolicy.arrays` names them.
    """

    parameters: Parameters
    state: LearnerState
    reference: Arrays


class RollbackPolicy:
    """Keeps a policy after which training stayed healthy for a number of updates.

    After every `window` healthy updates the candidate becomes the healthy policy, and the newest policy becomes the
    candidate: a rollback returns to a policy that was followed by `window` to 2 `window` healthy updates. At first both
    are the initial policy.
    """

    def __init__(self, start: Snapshot, *, window: int) -> None:
        self.window = window
        self._healthy = self._candidate = start
        self._healthy_updates = 0

    def observe(self, newest: Snapshot, *, healthy: bool) -> None:
        """Record one applied update and whether its batch looked healthy; other updates do not count."""
        if not healthy:
            return
        self._healthy_updates += 1
        if self._healthy_updates % self.window == 0:
            self._healthy, self._candidate = self._candidate, newest

    def roll_back(self) -> Snapshot:
        """Return the healthy policy, and start counting again from it."""
        self._candidate = self._healthy
        self._healthy_updates = 0
        return self._healthy

    def arrays(self) -> Arrays:
        """Name all arrays for a checkpoint."""
        named = {"healthy_updates": mx.array(self._healthy_updates, dtype=mx.int32)}
        for which, snapshot in zip(SNAPSHOTS, (self._healthy, self._candidate), strict=True):
            named |= {f"{which}.parameters.{name}": array for name, array in flat(snapshot.parameters).items()}
            named |= {f"{which}.state.{name}": array for name, array in state_arrays(snapshot.state).items()}
            named |= {f"{which}.reference.{name}": array for name, array in snapshot.reference.items()}
        return named

    def restore(self, arrays: Mapping[str, mx.array], settings: LearnerSection) -> None:
        """Restore what `arrays` named. Raises ValueError if it does not fit the trainable parameters."""
        start = flat(self._healthy.parameters)
        snapshots = []
        for which in SNAPSHOTS:
            parameters = with_prefix(arrays, f"{which}.parameters.")
            if {n: a.shape for n, a in parameters.items()} != {n: a.shape for n, a in start.items()}:
                raise ValueError(f"the {which} policy of the checkpoint does not fit the trainable parameters")
            state = state_from_arrays(with_prefix(arrays, f"{which}.state."), start, settings)
            snapshots.append(Snapshot(nested(parameters), state, with_prefix(arrays, f"{which}.reference.")))
        self._healthy_updates = int(np.array(arrays["healthy_updates"]))
        self._healthy, self._candidate = snapshots


def with_prefix(arrays: Mapping[str, mx.array], prefix: str) -> Arrays:
    """Return the arrays whose names start with `prefix`, named without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
