"""Whose weights compute a row: by default those of the policy, for every row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from clotho.inference.rows import RowAdapter
from clotho.models.adapters import AdapterContents
from clotho.models.policy_model import PolicyModel
from protocols.errors import ProfileError, RequestError
from protocols.sampling import POLICY

Computing = Callable[[Sequence[RowAdapter | None]], AbstractContextManager[None]]
"""Returns a context in which row b of a forward pass uses the adapter at index b; None for the policy."""


def pass_context(computing: Computing, adapter_B: Sequence[RowAdapter | None]) -> AbstractContextManager[None]:
    """Return the context of a forward pass; it is empty if all rows use the policy."""
    return nullcontext() if all(adapter is None for adapter in adapter_B) else computing(adapter_B)


class RowWeights:
    """The weights of the rows of one model: every row computes with the policy.

    A subclass lets requests name others. It belongs to the thread of the model.
    """

    def __init__(self, refusal: str = "this engine samples from the policy only") -> None:
        """refusal: what a request for other weights is told."""
        self._refusal = refusal

    @property
    def keeps_base(self) -> bool:
        """Whether a weight swap of the policy leaves the weights of all other rows as they are."""
        return True

    def admit(self, name: str) -> RowAdapter | None:
        """Return the adapter, or the base model, that a request names; None for the policy.

        name: as in `SampleRequest.weights`. Raises RequestError for an unknown name.
        """
        if name != POLICY:
            raise RequestError(self._refusal, param="model")
        return None

    def computing(self, adapter_B: Sequence[RowAdapter | None]) -> AbstractContextManager[None]:
        """Compute row b of a forward pass of the model with adapter_B[b] inside the context."""
        return nullcontext()

    def keep(self, versions: set[int]) -> None:
        """Release what was prepared for all adapters but these versions."""

    def of_copy(self, model: PolicyModel) -> RowWeights:
        """Return the same weights for a copy of the model, which may belong to another thread."""
        return self

    def read(self, path: Path, model: str) -> AdapterContents:
        """Read an adapter that the operator names, in any form of `policy.adapter`. model: value of `model.path`.

        Raises an error with exit status 2, also for what cannot be served beside the policy.
        """
        raise ProfileError(f"--adapter: {path}: {self._refusal}")

    def load(self, name: str, contents: AdapterContents, *, protected: Collection[str]) -> None:
        """Load an adapter before the first request. protected: names that it does not evict. Raises as `read`."""
        raise ProfileError(f"--adapter: {name}: {self._refusal}")
