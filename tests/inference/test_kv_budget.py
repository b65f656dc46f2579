"""The KV cache is divided between a batch of short rows and a batch of the long rows of clients."""

from __future__ import annotations

import pytest

from clotho.inference.kv_budget import KVBudget, Load, Loads, Waiting


@pytest.mark.parametrize(("short", "leaves"), [(400, False), (401, True)])
def test_a_long_row_leaves_once_the_two_batches_exceed_the_kv_cache(short: int, leaves: bool) -> None:
    """If it can leave."""
    budget = KVBudget(1000, 0.5, 8)
    for movable in (600, 0):
        loads = Loads(Load(rows=1, longest=short), Load(rows=1, longest=600, movable=movable))
        assert budget.long_must_leave(loads, Waiting()) == (leaves and movable > 0)
