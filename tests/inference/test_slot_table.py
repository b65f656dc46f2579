"""The adapters of the slots of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

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


def test_the_tokens_of_a_slot_have_the_version_of_its_adapter_or_of_the_policy() -> None:
    """Also with version 0. An adapter that changes under its rows is read again; a free slot has none."""
    table = SlotTable(frozenset(), 4)
    table.grow(4)
    used = row(EmptyAdapter(version=3), 1)
    for slot, one in enumerate((used, row(EmptyAdapter(version=0), 2), row(None, 3))):
        table.enter(slot, one, 0, 0, 8)
    slots, before = np.arange(4), table.adapters()
    assert table.versions(slots, 7).tolist() == [3, 0, 7, 7]
    used.active.adapter = EmptyAdapter(version=5)
    assert table.adapters() is before
    table.adapters_changed()
    assert table.versions(slots, 7).tolist() == [5, 0, 7, 7]
    assert table.adapters()[0] is used.active.adapter
    table.leave(0)
    assert table.versions(slots, 7).tolist() == [7, 0, 7, 7]
