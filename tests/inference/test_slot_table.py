"""The adapters of the slots of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from clotho.inference.batch import SlotTable
from clotho.inference.rows import RowAdapter
from clotho.inference.scheduler import ActiveRequest, Row
from protocols.sampling import SampleRequest, Sampling


@dataclass(eq=False, kw_only=True)
class EmptyAdapter:
    """An adapter without matrices."""

    version: int
    fingerprint: str = ""
    arrays: Mapping[str, mx.array] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)


def row(of: RowAdapter | None, number: int) -> Row:
    """Return a row that uses an adapter; None: the policy."""
    request = SampleRequest(prompt=(1,), sampling=Sampling(), seeds=(1,))
    active = ActiveRequest(number, request, lambda _: None, limit=8, open=1, adapter=of)
    return Row(active, 0, serial=number)


def test_the_adapters_of_the_slots_change_only_if_a_row_needs_it() -> None:
    """A free slot keeps its adapter while a row uses it, because a change is prepared for all layers."""
    one, other = EmptyAdapter(version=1), EmptyAdapter(version=2)
    table = SlotTable(frozenset(), 4)
    table.grow(4)
    for slot, used in enumerate((one, other, one, None)):
        table.enter(slot, row(used, slot + 1), 0, 0, 8)
    before = table.adapters()
    assert before == [one, other, one, None]
    assert table.adapters() is before
    table.leave(0)
    assert table.adapters() is before
    table.leave(2)
    assert table.adapters() == [other, other, other, None]
    table.enter(0, row(one, 5), 0, 0, 8)
    assert table.adapters() == [one, other, other, None]
    table.take([3, 0])
    assert table.adapters() == [None, one]
