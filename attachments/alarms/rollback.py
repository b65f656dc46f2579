"""The last healthy policy, to which a collapsing run returns."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from clotho.models.parameters import Arrays, flat, nested
from clotho.settings.learner import LearnerSection
from clotho.training.learner_state import LearnerSnapshot, state_arrays, state_from_arrays, with_prefix
from clotho.training.optimizers import PLAIN, StepRule

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
        self.healthy_updates = 0

    def observe(self, newest: LearnerSnapshot, *, healthy: bool) -> None:
        """Record one applied update and whether its batch looked healthy; other updates do not count."""
        if not healthy:
            return
        self.healthy_updates += 1
        if self.healthy_updates % self.window == 0:
            self._healthy, self._candidate = self._candidate, newest

    def roll_back(self) -> LearnerSnapshot:
        """Return the healthy policy, and start counting again from it."""
        self._candidate = self._healthy
        self.healthy_updates = 0
        return self._healthy

    def arrays(self) -> Arrays:
        """Name all arrays for a checkpoint."""
        named: Arrays = {}
        for which, snapshot in zip(SNAPSHOTS, (self._healthy, self._candidate), strict=True):
            named |= {f"{which}.parameters.{name}": array for name, array in flat(snapshot.parameters).items()}
            named |= {f"{which}.state.{name}": array for name, array in state_arrays(snapshot.state).items()}
            named |= {f"{which}.reference.{name}": array for name, array in snapshot.reference.items()}
        return named

    def restore(
        self,
        arrays: Mapping[str, mx.array],
        *,
        healthy_updates: int,
        settings: LearnerSection,
        rule: StepRule = PLAIN,
    ) -> None:
        """Restore what `arrays` named. settings, rule: of the learner.

        Raises ValueError, and changes nothing, if it does not fit the policy, its optimizer and its reference policy.
        """
        start = flat(self._healthy.parameters)
        snapshots = []
        for which in SNAPSHOTS:
            parameters, reference = (with_prefix(arrays, f"{which}.{kind}.") for kind in ("parameters", "reference"))
            if _shapes(parameters) != _shapes(start):
                raise ValueError(f"the {which} policy of the checkpoint does not fit the trainable parameters")
            if _shapes(reference) != _shapes(self._healthy.reference):
                raise ValueError(f"the {which} policy of the checkpoint has another kind of reference policy")
            state = state_from_arrays(with_prefix(arrays, f"{which}.state."), start, settings, rule)
            snapshots.append(LearnerSnapshot(nested(parameters), state, reference))
        self.healthy_updates = healthy_updates
        self._healthy, self._candidate = snapshots


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}
