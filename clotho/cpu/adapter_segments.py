"""Rows of a decode step with different adapters: sorted by adapter, so that each adapter has neighbouring rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.cpu.blas import Matrix, Product, matrix, prepared


class LowRank(NamedTuple):
    """The matrices of an adapter for one layer: A (inputs, rank) and B (rank, outputs)."""

    a: Matrix
    b: Matrix
    scale: float


class Segment(NamedTuple):
    """Neighbouring rows with the same adapter. layers: its matrices by layer; None for the policy's adapter."""

    rows: slice
    layers: Mapping[str, LowRank] | None


class Plan(NamedTuple):
    """The prepared low-rank products of a layer, for matrices at the addresses `key`. own: the policy's matrices."""

    key: tuple[int, ...]
    into_z: Callable[[], None]
    into_out: Callable[[], None]
    own: LowRank | None


class Arrangement:
    """The rows of a decode step in the order of their adapters.

    key: a number per slot that identifies its adapter. segments: of the sorted rows, in order. An arrangement belongs
    to the buffers of a decode step, whose addresses its plans contain.
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
        self._plans: dict[str, Plan] = {}

    def sorted(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return rows in the order of adapters, given in the order of slots."""
        return x if self._order_B is None else x[self._order_B]

    def by_slot(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return rows in the order of slots, given in the order of adapters."""
        return x if self._order_B is None else x[self._slot_B]

    def add(self, layer: str, own: LowRank | None, x: Matrix, out: Matrix, buffers: Mapping[int, Matrix]) -> None:
        """Add the low-rank products of all rows to `out`; the rows are sorted.

        own: matrices of the policy's adapter. buffers: for x A, by rank.
        """
        key = (x.address, out.address, *((own.a.address, own.b.address) if own is not None else ()))
        plan = self._plans.get(layer)
        if plan is None or plan.key != key:
            plan = self._plans[layer] = self._plan(key, layer, own, x, out, buffers)
        plan.into_z()
        plan.into_out()

    def _plan(
        self,
        key: tuple[int, ...],
        layer: str,
        own: LowRank | None,
        x: Matrix,
        out: Matrix,
        buffers: Mapping[int, Matrix],
    ) -> Plan:
        into_z, into_out = [], []
        for rows, layers in self.segments:
            low_rank = own if layers is None else layers.get(layer)
            if low_rank is not None:
                z = matrix(buffers[low_rank.a.array.shape[1]].array[rows])
                into_z.append(Product(matrix(x.array[rows]), low_rank.a, z))
                into_out.append(Product(z, low_rank.b, matrix(out.array[rows]), low_rank.scale, add=True))
        return Plan(key, prepared(into_z), prepared(into_out), own)

    def changes(self, layer: str, *, by_policy: bool) -> bool:
        """Whether any row has an adapter of this layer. by_policy: whether the policy's adapter has one."""
        return any(by_policy if one.layers is None else layer in one.layers for one in self.segments)
