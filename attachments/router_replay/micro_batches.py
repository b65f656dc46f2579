"""The routes of a micro-batch: each once, with its index in place of each token of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.scoring.sequences import RouteInputs, TrainingSequence


def routes_of_sequences(
    sequences: Sequence[TrainingSequence],
    inputs_of: Callable[[Sequence[TrainingSequence]], list[NamedTuple]],
    replays: bool,
) -> list[RouteInputs]:
    """Return the routes of each micro-batch; arguments are those of `MICRO_BATCH_ROUTES`."""
    indexed, table_X_E, known_X = indexed_routes(sequences)
    return [routes_of(inputs, table_X_E, known_X, replays=replays) for inputs in inputs_of(indexed)]


def indexed_routes(
    sequences: Sequence[TrainingSequence],
) -> tuple[list[TrainingSequence], NDArray[np.uint8], NDArray[np.bool_]]:
    """Return the sequences with the index of its route in place of each token, the routes, and which are known.

    At least one sequence has routes. 0 is the route of padding. Equal prompts have the routes of the first sequence
    with routes, because a layout may compute them once. Routes are (X, E) bytes, as in `RouteInputs`.
    """
    width = next(sequence.route_I_E.shape[1] for sequence in sequences if sequence.route_I_E is not None)
    routes, known, size = [np.zeros((1, width), dtype=np.uint8)], [np.ones(1, dtype=np.bool_)], 1

    def added(sequence: TrainingSequence, part: slice) -> tuple[int, ...]:
        """Add the routes of a part of the inputs of a sequence, and return their indices."""
        nonlocal size
        count, route_I_E = len(range(sequence.inputs)[part]), sequence.route_I_E
        routes.append(np.zeros((count, width), dtype=np.uint8) if route_I_E is None else route_I_E[part])
        known.append(np.full(count, route_I_E is not None))
        size += count
        return tuple(range(size - count, size))

    prompts: dict[tuple[int, ...], tuple[int, ...]] = {}
    for sequence in sorted(sequences, key=lambda one: one.route_I_E is None):
        if sequence.prompt not in prompts:
            prompts[sequence.prompt] = added(sequence, slice(len(sequence.prompt)))
    indexed = [
        one._replace(prompt=prompts[one.prompt], tokens=(*added(one, slice(len(one.prompt), one.inputs)), 0))
        for one in sequences
    ]
    return indexed, np.concatenate(routes), np.concatenate(known)


def routes_of(
    inputs: NamedTuple, table_X_E: NDArray[np.uint8], known_X: NDArray[np.bool_], *, replays: bool
) -> RouteInputs:
    """Return the routes that the inputs of one micro-batch of indexed sequences refer to."""
    given: dict[str, NDArray[np.int32]] = inputs._asdict()
    named = {name: array for name, array in given.items() if name.startswith("tokens")}
    used_X = np.unique(np.concatenate([[0], *(array.ravel() for array in named.values())]))
    own = {name: np.searchsorted(used_X, array).astype(np.int32) for name, array in named.items()}
    return RouteInputs(inputs._replace(**own), table_X_E[used_X], known_X[used_X], replays)
