"""The routes of the tokens of a layout: the layout of their indices instead of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.scoring.sequences import RouteInputs, TrainingSequence


class RouteTable:
    """The routes of all tokens of some sequences. At least one has routes.

    Equal prompts have the routes of the first sequence with routes, because a layout may compute them once.
    indexed: the sequences, with the index of its route in place of each token; 0 is the route of padding.
    """

    def __init__(self, sequences: Sequence[TrainingSequence]) -> None:
        width = next(sequence.route_I_E.shape[1] for sequence in sequences if sequence.route_I_E is not None)
        self._routes, self._known = [np.zeros((1, width), dtype=np.uint8)], [np.ones(1, dtype=np.bool_)]
        self._size = 1
        prompts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for sequence in sorted(sequences, key=lambda one: one.route_I_E is None):
            if sequence.prompt not in prompts:
                prompts[sequence.prompt] = self._added(sequence, slice(len(sequence.prompt)))
        self.indexed = [
            sequence._replace(
                prompt=prompts[sequence.prompt],
                tokens=(*self._added(sequence, slice(len(sequence.prompt), sequence.inputs)), 0),
            )
            for sequence in sequences
        ]
        self._table_X_E, self._known_X = np.concatenate(self._routes), np.concatenate(self._known)

    def _added(self, sequence: TrainingSequence, part: slice) -> tuple[int, ...]:
        """Add the routes of a part of the inputs of a sequence, and return their indices."""
        count = len(range(sequence.inputs)[part])
        route_I_E, width = sequence.route_I_E, self._routes[0].shape[1]
        self._routes.append(np.zeros((count, width), dtype=np.uint8) if route_I_E is None else route_I_E[part])
        self._known.append(np.full(count, route_I_E is not None))
        self._size += count
        return tuple(range(self._size - count, self._size))

    def of(self, inputs: NamedTuple, *, replays: bool) -> RouteInputs:
        """Return the routes that the inputs of one micro-batch of `indexed` refer to."""
        given: dict[str, NDArray[np.int32]] = inputs._asdict()
        named = {name: array for name, array in given.items() if name.startswith("tokens")}
        used_X = np.unique(np.concatenate([[0], *(array.ravel() for array in named.values())]))
        own = {name: np.searchsorted(used_X, array).astype(np.int32) for name, array in named.items()}
        return RouteInputs(inputs._replace(**own), self._table_X_E[used_X], self._known_X[used_X], replays)
