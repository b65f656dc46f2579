"""The policy that the KL penalty pulls towards: the base, a snapshot of the learner, its average, or another's.

A reference policy that follows the learner at a distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.config.sections_training import AverageReference, BaseReference, EnvironmentReference, SnapshotReference
from clotho.models.parameters import Arrays, Parameters, flat, nested
from clotho.models.policy import TrainablePolicy


def averaged(reference: Arrays, policy: Arrays, keep: float) -> Arrays:
    """Moving average of parameters: keep times the reference plus 1 - keep times the policy, name by name.

    WARP (arXiv:2406.16768) anchors the KL penalty to such an average. Computed in float32, in the form reference +
    (1 - keep) (policy - reference), which leaves equal parameters bit for bit as they are; the type is the reference's:
    in bfloat16 steps below a 256th of a parameter would be lost, so hold the reference in float32. Raises ValueError
    where the names differ.
    """
    if reference.keys() != policy.keys():
        raise ValueError(f"reference and policy differ in {', '.join(sorted(reference.keys() ^ policy.keys())[:3])}")
    return {name: _between(array, policy[name], 1.0 - keep) for name, array in reference.items()}


def _between(old: mx.array, new: mx.array, share: float) -> mx.array:
    start = old.astype(mx.float32)
    return (start + share * (new.astype(mx.float32) - start)).astype(old.dtype)


class ReferencePolicy:
    """Computes as the reference inside `with reference.computing():`, and follows the learner as the profile says.

    base: adapters off, nothing is kept. snapshot: the learner's first parameters, taken anew every
    `reference_interval` updates; arrays are shared with the learner. average: keeps `ref_ema` of itself with every
    update, in float32, for in 16 bits small steps would be lost. environment: nothing is kept or computed, for the
    groups bring its log-probabilities.

    needed: whether log-probabilities under it are computed here.
    """

    def __init__(self, policy: TrainablePolicy, settings: LearnerSection) -> None:
        self._policy, self._settings = policy, settings.reference
        self.needed = not isinstance(self._settings, EnvironmentReference | None)
        self._types = {name: array.dtype for name, array in flat(policy.trainable()).items()}
        self._arrays: Arrays = {}
        if self.needed and not isinstance(self._settings, BaseReference):
            self._arrays = {name: self._kept(array) for name, array in flat(policy.trainable()).items()}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute as the reference policy inside."""
        with self._policy.using(self._parameters()) if self._arrays else self._policy.reference():
            yield

    def follow(self, parameters: Parameters, *, updates: int) -> None:
        """Follow the learner after an update, the `updates`-th, has made `parameters`."""
        match self._settings:
            case AverageReference(decay=decay):
                self._arrays = averaged(self._arrays, flat(parameters), decay)
                mx.eval(self._arrays)
            case SnapshotReference(interval=interval) if interval and updates % interval == 0:
                self._arrays = flat(parameters)

    def arrays(self) -> Arrays:
        """The reference's own arrays, by parameter name, for a checkpoint; empty for the base."""
        return self._arrays

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Take back what `arrays` named. Raises ValueError where names or shapes differ from the parameters'."""
        wrong = sorted(self._arrays.keys() ^ arrays.keys()) or sorted(
            name for name, array in self._arrays.items() if array.shape != arrays[name].shape
        )
        if wrong:
            raise ValueError(f"the reference policy does not fit the trainable parameters: {', '.join(wrong[:3])}")
        self._arrays = dict(arrays)

    def _kept(self, array: mx.array) -> mx.array:
        return array.astype(mx.float32) if isinstance(self._settings, AverageReference) else array

    def _parameters(self) -> Parameters:
        return nested({name: array.astype(self._types[name]) for name, array in self._arrays.items()})
