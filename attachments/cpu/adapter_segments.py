"""Rows of a decode step with different adapters: rows with the same one are computed together, others cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from attachments.cpu.blas import Floats, Matrix, Product, matrix, part, prepared

ALL = slice(0, None)


class LowRank(NamedTuple):
    """The matrices of an adapter for one layer: A (inputs, rank) and B (rank, outputs)."""

    a: Matrix
    b: Matrix
    scale: float


class Part(NamedTuple):
    """The second product of one layer of a group: columns `columns` of z = x A are multiplied by B."""

    layer: int
    columns: slice
    b: Matrix
    scale: float


class GroupLowRank(NamedTuple):
    """The matrices of an adapter for a group of layers that read the same input.

    a: matrices A with their columns of z. rank: number of columns of z.
    """

    a: tuple[tuple[slice, Matrix], ...]
    parts: tuple[Part, ...]
    rank: int


class ExpertLowRank(NamedTuple):
    """The matrices of an adapter for a linear layer of E experts."""

    a_E_R_I: Floats
    b_E_O_R: Floats
    scale: float


LowRanks = Mapping[str, GroupLowRank | ExpertLowRank]
"""The matrices of an adapter by name of a group of layers, or of a layer of experts."""


def grouped(low_ranks: Sequence[LowRank | None], *, joins: bool) -> GroupLowRank | None:
    """Return the matrices of the layers of a group; None if no layer has an adapter.

    joins: copy all matrices A into one matrix, so that x is multiplied once.
    """
    found = [(layer, one) for layer, one in enumerate(low_ranks) if one is not None]
    if not found:
        return None
    ends = list(accumulate((one.a.array.shape[1] for _, one in found), initial=0))
    columns = [slice(*edges) for edges in pairwise(ends)]
    parts = tuple(Part(layer, place, one.b, one.scale) for place, (layer, one) in zip(columns, found, strict=True))
    if joins and len(found) > 1:
        a = ((slice(0, ends[-1]), matrix(np.concatenate([one.a.array for _, one in found], axis=1))),)
        return GroupLowRank(a, parts, ends[-1])
    return GroupLowRank(tuple((place, one.a) for place, (_, one) in zip(columns, found, strict=True)), parts, ends[-1])


def low_rank_products(
    found: GroupLowRank, rows: slice, x: Matrix, outs: Sequence[Matrix], buffers: Mapping[int, Matrix]
) -> tuple[list[Product], list[Product]]:
    """Return the products z = x A of some rows, and those that add z B to `outs`. buffers: for z, by its columns."""
    z, x_rows = buffers[found.rank], part(x, rows, ALL)
    return (
        [Product(x_rows, a, part(z, rows, columns)) for columns, a in found.a],
        [
            Product(part(z, rows, columns), b, part(outs[layer], rows, ALL), scale, add=True)
            for layer, columns, b, scale in found.parts
        ],
    )


class Layers(Protocol):
    """A group of layers that read the same input."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def own(self) -> list[LowRank | None]:
        """Return the matrices of the policy's adapter, by layer."""
        ...


class Segment(NamedTuple):
    """Neighbouring rows with the same adapter. groups: its matrices; None for the policy's."""

    rows: slice
    groups: LowRanks | None


class Plan(NamedTuple):
    """The prepared low-rank products of a group, for matrices at the addresses `key`. own: the policy's matrices."""

    key: tuple[int, ...]
    into_z: Callable[[], None]
    into_out: Callable[[], None]
    own: list[LowRank | None]


class Arrangement:
    """The rows of a decode step in segments of equal adapters.

    Rows are sorted by adapter if that makes fewer segments with matrices than the order of the slots. An arrangement
    belongs to the buffers of a decode step, whose addresses its plans contain. key: a number per slot that identifies
    its adapter. segments: of the rows as they are computed, in order.
    """

    def __init__(self, key: tuple[int, ...], groups_B: Sequence[LowRanks | None]) -> None:
        """groups_B: the matrices of every slot's adapter; None for the policy."""
        self.key = key
        key_B = np.array(key)
        has_matrices_B = np.array([groups is None or bool(groups) for groups in groups_B])
        order_B = np.arange(len(key))
        starts = _starts(key_B)
        if np.count_nonzero(has_matrices_B[starts]) > len(set(key_B[has_matrices_B].tolist())):
            order_B = np.argsort(key_B, kind="stable")
            starts = _starts(key_B[order_B])
        self._order_B = order_B if (np.diff(order_B) != 1).any() else None
        self._slot_B = np.argsort(order_B)
        self.segments = [Segment(slice(a, b), groups_B[order_B[a]]) for a, b in pairwise([*starts, len(key)])]
        self._has_policy = any(one.groups is None for one in self.segments)
        self._plans: dict[str, Plan] = {}

    def sorted(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return rows in the order of computation, given in the order of slots."""
        return x if self._order_B is None else x[self._order_B]

    def by_slot(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return rows in the order of slots, given in the order of computation."""
        return x if self._order_B is None else x[self._slot_B]

    def add(self, layers: Layers, x: Matrix, outs: Sequence[Matrix], buffers: Mapping[int, Matrix]) -> None:
        """Add the low-rank products of all rows to `outs`, one matrix per layer.

        The rows are in the order of computation. buffers: for z = x A, by the number of its columns.
        """
        own = layers.own() if self._has_policy else []
        addresses = [address for one in own if one is not None for address in (one.a.address, one.b.address)]
        key = (x.address, *(out.address for out in outs), *addresses)
        plan = self._plans.get(layers.name)
        if plan is None or plan.key != key:
            plan = self._plans[layers.name] = self._plan(key, layers.name, own, x, outs, buffers)
        plan.into_z()
        plan.into_out()

    def _plan(
        self,
        key: tuple[int, ...],
        name: str,
        own: list[LowRank | None],
        x: Matrix,
        outs: Sequence[Matrix],
        buffers: Mapping[int, Matrix],
    ) -> Plan:
        into_z, into_out = list[Product](), list[Product]()
        policy = grouped(own, joins=False)
        for rows, groups in self.segments:
            found = policy if groups is None else groups.get(name)
            if isinstance(found, GroupLowRank):
                first, second = low_rank_products(found, rows, x, outs, buffers)
                into_z += first
                into_out += second
        return Plan(key, prepared(into_z), prepared(into_out), own)

    def changes(self, name: str, *, by_policy: bool) -> bool:
        """Whether any row has an adapter of this group of layers. by_policy: whether the policy's adapter has one."""
        return any(by_policy if one.groups is None else name in one.groups for one in self.segments)


def _starts(key_B: NDArray[np.int64]) -> list[int]:
    """Return the first row of every run of equal keys."""
    starts: list[int] = [0, *(np.flatnonzero(np.diff(key_B)) + 1).tolist()]
    return starts
