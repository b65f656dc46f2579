"""Signs that what is trained does not learn."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from clotho.models.parameters import Arrays
from protocols.errors import AdapterError

PATIENCE = 3
"""Updates after which an adapter's B must have left zero."""


class AdapterWatch:
    """Sees to it that every low-rank adapter leaves its start, where B = 0 (arXiv:2106.09685, section 4.1).

    B is zero only until its first step. Where it stays so, the adapter's output is nothing and A has no gradient: the
    weights are not the ones that are served, or an array is lost on the way. An adapter that has once been seen to move
    is not looked at again, so this costs a reduction per B array in the first updates, and nothing later.
    """

    def __init__(self, *, patience: int = PATIENCE) -> None:
        """patience: updates that a B may stay zero."""
        self._patience = patience
        self._updates = 0
        self._given: dict[str, int] | None = None
        self._any_moved = False

    def observe(self, parameters: Arrays, gradients: Arrays) -> None:
        """Look at the outcome of an update that was applied and that groups with unequal rewards taught.

        parameters: after it. gradients: of its last step, by the same names. Raises AdapterError where after `patience`
        updates no B at all has left zero, or one has not that was given a gradient in as many: experts that no token
        was sent to may stay. Evaluates, unless all have moved.
        """
        if self._given is None:
            self._given = {name: 0 for name in parameters if name.endswith("lora_b")}
            self._any_moved = not self._given
        if not self._given:
            return
        self._updates += 1
        names = list(self._given)
        moved_M = np.array(mx.stack([mx.any(parameters[name] != 0) for name in names]))
        given_M = np.array(mx.stack([mx.any(gradients[name] != 0) for name in names]))
        self._any_moved |= bool(moved_M.any())
        self._given = {
            name: self._given[name] + int(given)
            for name, moved, given in zip(names, moved_M, given_M, strict=True)
            if not moved
        }
        self._refuse_the_dead()

    def _refuse_the_dead(self) -> None:
        assert self._given is not None
        if not self._any_moved and self._updates >= self._patience:
            raise AdapterError(
                f"after {self._updates} updates from unequal rewards B of every adapter is still exactly zero: nothing "
                "is learned. Please report this with the model's name"
            )
        dead = [name.removesuffix(".lora_b") for name, given in self._given.items() if given >= self._patience]
        if dead:
            raise AdapterError(
                f"{len(dead)} adapter(s) were given gradients in {self._patience} updates and B is still exactly zero: "
                f"{', '.join(dead[:5])}. Leave them out by policy.target_modules, and please report this with the "
                "model's name"
            )
