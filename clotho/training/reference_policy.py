"""The reference policy of an objective or a penalty: the base model, a snapshot of the policy, or its average."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from clotho.models.parameters import Arrays, Parameters, flat, nested
from clotho.models.policy import TrainablePolicy
from clotho.models.policy_model import WeightedModel
from clotho.settings.learner import (
    AverageReference,
    BaseReference,
    EnvironmentReference,
    LearnerSection,
    SnapshotReference,
)


def averaged(reference: Arrays, policy: Arrays, keep: float) -> Arrays:
    """Return the moving average of parameters: keep * reference + (1 - keep) * policy, by name.

    WARP (arXiv:2406.16768) uses such an average as reference. Computed in float32 as reference + (1 - keep) * (policy -
    reference), which leaves equal parameters bit for bit unchanged. The result has the type of the reference, which
    should be float32: bfloat16 would lose steps below 1/256 of a parameter. Raises ValueError if the names differ.
    """
    if reference.keys() != policy.keys():
        raise ValueError(f"reference and policy differ in {', '.join(sorted(reference.keys() ^ policy.keys())[:3])}")
    return {name: _between(array, policy[name], 1.0 - keep) for name, array in reference.items()}


def _between(old: mx.array, new: mx.array, share: float) -> mx.array:
    start = old.astype(mx.float32)
    return (start + share * (new.astype(mx.float32) - start)).astype(old.dtype)


class ReferencePolicy:
    """Lets the learner's model compute as the reference policy, and follows the learner.

    base: the model without its adapter; needs no memory. snapshot: the first parameters of the learner, replaced every
    `interval` updates; arrays are shared with the learner. average: an exponential moving average in float32, because
    small steps would be lost in 16 bits. environment: groups contain the log-probabilities, so no weights are kept.

    needed: whether reference log-probabilities must be computed. arrays: of the reference by parameter name, for a
    checkpoint; empty for `base`.
    """

    def __init__(self, policy: TrainablePolicy, settings: LearnerSection) -> None:
        self._settings = settings.reference
        self.needed = not isinstance(self._settings, EnvironmentReference | None)
        self._types = {name: array.dtype for name, array in flat(policy.trainable()).items()}
        self.arrays: Arrays = {}
        if self.needed and not isinstance(self._settings, BaseReference):
            self.arrays = {name: self._kept(array) for name, array in flat(policy.trainable()).items()}

    def use(self, policy: WeightedModel) -> None:
        """Let a model compute as the reference policy."""
        if self.arrays:
            policy.use(self._parameters())
        else:
            policy.use_reference()

    def follow(self, parameters: Parameters, *, updates: int) -> None:
        """Follow the learner after its update number `updates`, which produced `parameters`."""
        match self._settings:
            case AverageReference(decay=decay):
                self.arrays = averaged(self.arrays, flat(parameters), decay)
                mx.eval(self.arrays)
            case SnapshotReference(interval=interval) if interval and updates % interval == 0:
                self.arrays = flat(parameters)

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Restore `arrays`. Raises ValueError if names or shapes do not fit the parameters."""
        wrong = sorted(self.arrays.keys() ^ arrays.keys()) or sorted(
            name for name, array in self.arrays.items() if array.shape != arrays[name].shape
        )
        if wrong:
            raise ValueError(f"the reference policy does not fit the trainable parameters: {', '.join(wrong[:3])}")
        self.arrays = dict(arrays)

    def _kept(self, array: mx.array) -> mx.array:
        return array.astype(mx.float32) if isinstance(self._settings, AverageReference) else array

    def _parameters(self) -> Parameters:
        return nested({name: array.astype(self._types[name]) for name, array in self.arrays.items()})
