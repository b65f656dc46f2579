"""The learner's state beside the parameters, and the last healthy policy to which a collapsing run returns."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from clotho.models.parameters import Arrays, flat, nested
from clotho.settings.learner import LearnerSection
from clotho.training.learner_state import LearnerSnapshot, state_arrays, state_from_arrays, with_prefix

SNAPSHOTS = ("healthy", "candidate")


class RollbackPolicy:
    """Keeps a policy after which training stayed healthy for a number of updates.

    After every `window` healthy updates the candidate becomes the healthy policy, and the newest policy becomes the
    candidate: a rollback returns to a policy that was followed by `window` to 2 `window` healthy updates. At first both
    are the initial policy.
    """

    def __init__(self, start: LearnerSnapshot, *, window: int) -> None:
        self.window = window
        self._healthy = self._candidate = start
        self._healthy_updates = 0

    def observe(self, newest: LearnerSnapshot, *, healthy: bool) -> None:
        """Record one applied update and whether its batch looked healthy; other updates do not count."""
        if not healthy:
            return
        self._healthy_updates += 1
        if self._healthy_updates % self.window == 0:
            self._healthy, self._candidate = self._candidate, newest

    def roll_back(self) -> LearnerSnapshot:
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
            snapshots.append(LearnerSnapshot(nested(parameters), state, with_prefix(arrays, f"{which}.reference.")))
        self._healthy_updates = int(np.array(arrays["healthy_updates"]))
        self._healthy, self._candidate = snapshots
