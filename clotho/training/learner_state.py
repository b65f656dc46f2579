"""The state of a learner between two updates, as arrays: for checkpoints, and to return to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.models.parameters import Arrays, Parameters
from clotho.settings.learner import LearnerSection
from clotho.training import optimizers
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizers import PLAIN, OptimizerState, StepRule

SCALARS = "scalars"
"""Name of the array that holds the scalars of the state, as the bits of float64."""


class LearnerState(NamedTuple):
    """What the learner carries from update to update besides the parameters.

    loss_coefficients: of the KL penalty and the entropy bonus in the next update. rate_factor: factor of the learning
    rate, below 1 after a rollback. updates: number of updates applied. replays: whether the last update took the routes
    of the sampler.
    """

    optimizer: OptimizerState
    loss_coefficients: LossCoefficients
    rate_factor: float = 1.0
    updates: int = 0
    replays: bool = False


def state_arrays(state: LearnerState) -> Arrays:
    """Name every array of the state: `optimizer.NAME` with the names of the optimizer's state, and `scalars`."""
    scalars = np.array([*state.loss_coefficients, state.rate_factor, state.updates, state.replays], dtype=np.float64)
    named = {f"optimizer.{name}": array for name, array in optimizers.state_arrays(state.optimizer).items()}
    return named | {SCALARS: mx.array(scalars.view(np.uint32))}


def state_from_arrays(
    arrays: Mapping[str, mx.array], parameters: Arrays, settings: LearnerSection, rule: StepRule = PLAIN
) -> LearnerState:
    """Rebuild the state that `state_arrays` named, bit for bit. Raises ValueError if it does not fit `parameters`."""
    if SCALARS not in arrays:
        raise ValueError(f"the learner's state does not fit: {SCALARS} is missing")
    kl_beta, entropy_coef, rate_factor, updates, *replays = np.array(arrays[SCALARS]).view(np.float64).tolist()
    optimizer = {name.removeprefix("optimizer."): array for name, array in arrays.items() if name != SCALARS}
    return LearnerState(
        optimizer=optimizers.state_from_arrays(optimizer, parameters, settings, rule),
        loss_coefficients=LossCoefficients(kl_beta, entropy_coef),
        rate_factor=rate_factor,
        updates=int(updates),
        replays=any(replays),
    )


class LearnerSnapshot(NamedTuple):
    """The learner at one moment; arrays are shared. reference: as `ReferencePolicy.arrays`."""

    parameters: Parameters
    state: LearnerState
    reference: Arrays


def with_prefix(arrays: Mapping[str, mx.array], prefix: str) -> Arrays:
    """Return the arrays whose names start with `prefix`, named without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
