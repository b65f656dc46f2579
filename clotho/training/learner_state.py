"""What learning carries from update to update beside the parameters, by name, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.training.objectives.loss import Strengths
from clotho.training.optimizers import state as optimizers
from clotho.training.optimizers.state import OptimizerState

Arrays = dict[str, mx.array]

NUMBERS = "numbers"
"""Name of the array that holds the plain numbers of the state, as the bits of float64."""


class LearnerState(NamedTuple):
    """Optimizer, controllers, and counters.

    strengths: of KL penalty and entropy bonus in the next update. rate_factor: of the learning rate, below 1 after a
    rollback. updates: applied so far.
    """

    optimizer: OptimizerState
    strengths: Strengths
    rate_factor: float = 1.0
    updates: int = 0


def state_arrays(state: LearnerState) -> Arrays:
    """Name every array of the state: `optimizer.NAME` as the optimizer names them, and `numbers`."""
    plain = np.array([*state.strengths, state.rate_factor, state.updates], dtype=np.float64)
    named = {f"optimizer.{name}": array for name, array in optimizers.state_arrays(state.optimizer).items()}
    return named | {NUMBERS: mx.array(plain.view(np.uint32))}


def state_from_arrays(arrays: Mapping[str, mx.array], parameters: Arrays, *, kind: str) -> LearnerState:
    """Rebuild the state that `state_arrays` named, bit for bit. Raises ValueError where it does not fit.

    parameters: the trainable ones that it belongs to; kind: of the optimizer.
    """
    if NUMBERS not in arrays:
        raise ValueError(f"the learner's state does not fit: {NUMBERS} is missing")
    kl_beta, entropy_weight, rate_factor, updates = np.array(arrays[NUMBERS]).view(np.float64).tolist()
    optimizer = {name.removeprefix("optimizer."): array for name, array in arrays.items() if name != NUMBERS}
    return LearnerState(
        optimizer=optimizers.state_from_arrays(optimizer, parameters, kind=kind),
        strengths=Strengths(kl_beta, entropy_weight),
        rate_factor=rate_factor,
        updates=int(updates),
    )
