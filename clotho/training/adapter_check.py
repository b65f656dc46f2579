"""Detects low-rank adapters that training does not move."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from clotho.models.parameters import Arrays
from protocols.errors import AdapterError

PATIENCE = 3
"""Number of updates after which the B matrix of an adapter must be different from zero."""


class AdapterCheck:
    """Raises if the B matrix of a LoRA adapter stays at its initial value, zero (arXiv:2106.09685, section 4.1).

    B is zero only until its first step. If B stays zero, the output of the adapter is zero and A has no gradient: the
    trained weights are not the served weights, or an array is lost between them. An adapter that has moved once is not
    checked again, so the check costs one reduction per B matrix in the first updates and nothing later.
    """

    def __init__(self, *, patience: int = PATIENCE) -> None:
        """patience: number of updates for which B may stay zero."""
        self._patience = patience
        self._updates = 0
        self._unmoved: dict[str, int] | None = None  # number of updates with a gradient, by name of B
        self._any_moved = False

    def check(self, parameters: Arrays, gradients: Arrays) -> None:
        """Check the result of an update that was applied.

        parameters: after the update. gradients: of its last optimizer step, by the same names. Raises AdapterError if
        after `patience` updates no B has moved, or if a B has not moved that had a gradient in as many updates (experts
        that no token was routed to have none). Evaluates arrays until all have moved.
        """
        if self._unmoved is None:
            self._unmoved = {name: 0 for name in parameters if name.endswith("lora_b")}
            self._any_moved = not self._unmoved
        if not self._unmoved:
            return
        self._updates += 1
        names = list(self._unmoved)
        moved_M = np.array(mx.stack([mx.any(parameters[name] != 0) for name in names]))
        has_gradient_M = np.array(mx.stack([mx.any(gradients[name] != 0) for name in names]))
        self._any_moved |= bool(moved_M.any())
        self._unmoved = {
            name: self._unmoved[name] + int(has_gradient)
            for name, moved, has_gradient in zip(names, moved_M, has_gradient_M, strict=True)
            if not moved
        }
        self._raise_if_stuck(self._unmoved)

    def _raise_if_stuck(self, unmoved: dict[str, int]) -> None:
        if not self._any_moved and self._updates >= self._patience:
            raise AdapterError(
                f"after {self._updates} updates the B matrix of every adapter is still exactly zero: training changes "
                "nothing. Please report this with the name of the model"
            )
        stuck = [name.removesuffix(".lora_b") for name, count in unmoved.items() if count >= self._patience]
        if stuck:
            raise AdapterError(
                f"{len(stuck)} adapter(s) had gradients in {self._patience} updates and their B matrix is still "
                f"exactly zero: {', '.join(stuck[:5])}. Exclude them with policy.method.target_modules, and please "
                "report this with the name of the model"
            )
