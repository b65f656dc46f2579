"""Rows of a decode step with different adapters: sorted by adapter, so that each adapter has neighbouring rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.cpu.blas import Matrix, matrix


class LowRank(NamedTuple):
    """The matrices of an adapter for one layer: A (inputs, rank) and B (rank, outputs)."""

    a: Matrix
    b: Matrix
    scale: float


class Segment(NamedTuple):
    """Neighbouring rows with the same adapter. layers: its matrices by layer; None for the policy's adapter."""

    rows: slice
    layers: Mapping[str, LowRank] | None


class Arrangement:
    """The rows of a decode step in the order of their adapters.

    key: a number per slot that identifies its adapter. segments: of the sorted rows, in order.
    """

    def __init__(self, key: tuple[int, ...], layers_B: Sequence[Mapping[str, LowRank] | None]) -> None:
        """layers_B: the matrices of every slot's adapter; None for the policy."""
        self.key = key
        key_B = np.array(key)
        order_B = np.argsort(key_B, kind="stable")
        self._order_B = order_B if (np.diff(order_B) != 1).any() else None
        self._slot_B = np.argsort(order_B)
        starts = [0, *(np.flatnonzero(np.diff(key_B[order_B])) + 1).tolist(), len(key)]
        self.segments = [Segment(slice(a, b), layers_B[order_B[a]]) for a, b in pairwise(starts)]
        self._views: dict[int, dict[int, Matrix]] = {}

    def sorted(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return rows in the order of adapters, given in the order of slots."""
        return x if self._order_B is None else x[self._order_B]

    def by_slot(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return rows in the order of slots, given in the order of adapters."""
        return x if self._order_B is None else x[self._slot_B]

    def rows_of(self, one: Matrix, segment: Segment) -> Matrix:
        """Return the rows of a segment of a buffer as a matrix, which is kept until `release`."""
        views = self._views.setdefault(one.address, {})
        view = views.get(segment.rows.start)
        if view is None:
            view = views[segment.rows.start] = matrix(one.array[segment.rows])
        return view

    def release(self, one: Matrix) -> None:
        """Forget a buffer that later steps do not use."""
        self._views.pop(one.address, None)

    def changes(self, layer: str, *, by_policy: bool) -> bool:
        """Whether any row has an adapter of this layer. by_policy: whether the policy's adapter has one."""
        return any(by_policy if one.layers is None else layer in one.layers for one in self.segments)
