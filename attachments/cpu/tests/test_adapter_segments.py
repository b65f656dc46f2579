"""Rows with different adapters: which rows are computed together, and what is added to the outputs of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from attachments.cpu.adapter_segments import Arrangement, GroupLowRank, LowRank, grouped
from attachments.cpu.blas import Floats, Matrix, matrix
from attachments.cpu.decoder_layers import LowRankBuffers

pytestmark = pytest.mark.needs_cpu_path

INPUTS, OUTPUTS = 6, (5, 3)
POLICY, BASE = 0, -1


def low_ranks(seed: int, ranks: Sequence[int]) -> list[LowRank | None]:
    """Random matrices for the layers of a group; rank 0: no adapter of the layer."""
    random = np.random.default_rng(seed)

    def low_rank(rank: int, outputs: int) -> LowRank | None:
        if not rank:
            return None
        a, b = random.normal(size=(INPUTS, rank)), random.normal(size=(rank, outputs))
        return LowRank(matrix(a.astype(np.float32)), matrix(b.astype(np.float32)), 0.5 + seed)

    return [low_rank(rank, outputs) for rank, outputs in zip(ranks, OUTPUTS, strict=True)]


ADAPTERS = {1: low_ranks(1, (2, 3)), 2: low_ranks(2, (4, 0)), 3: low_ranks(3, (0, 1)), BASE: low_ranks(4, (0, 0))}


class Group(NamedTuple):
    """A group of layers with the policy's matrices."""

    matrices: list[LowRank | None]
    name: str = "group"

    def own(self) -> list[LowRank | None]:
        """Return the policy's matrices."""
        return self.matrices


def groups_of(adapter: int) -> dict[str, GroupLowRank] | None:
    """Return the matrices of an adapter by group; None for the policy."""
    if adapter == POLICY:
        return None
    found = grouped(ADAPTERS[adapter], joins=True)
    return {} if found is None else {"group": found}


def arranged(adapter_B: Sequence[int]) -> Arrangement:
    """Arrange rows with these adapters."""
    return Arrangement(tuple(adapter_B), [groups_of(adapter) for adapter in adapter_B])


def random_rows(rows: int, width: int) -> Floats:
    """Random rows."""
    return np.random.default_rng(rows + width).normal(size=(rows, width)).astype(np.float32)


def added(arrangement: Arrangement, own: list[LowRank | None], x: Floats) -> list[Floats]:
    """Return what is added to the outputs of both layers, by slot."""
    before = [random_rows(len(x), outputs) for outputs in OUTPUTS]
    outs: list[Matrix] = [matrix(out.copy()) for out in before]
    arrangement.add(Group(own), matrix(arrangement.sorted(x).copy()), outs, LowRankBuffers(len(x)))
    return [arrangement.by_slot(out.array - one) for out, one in zip(outs, before, strict=True)]


@pytest.mark.parametrize("own_ranks", [(0, 0), (3, 2), (0, 2)])
@pytest.mark.parametrize(
    "adapter_B", [(1, 1, 1), (1, BASE, 2, BASE), (POLICY, 3, POLICY, 2, 3, BASE, 1), (2, 1, 2, 1, 2, POLICY)]
)
def test_every_row_gets_the_products_of_its_adapter_only(
    adapter_B: tuple[int, ...], own_ranks: tuple[int, int]
) -> None:
    """Also with layers without an adapter, with the policy, and after a weight swap of the policy."""
    arrangement, x = arranged(adapter_B), random_rows(len(adapter_B), INPUTS)
    for seed in (8, 9):
        own = low_ranks(seed, own_ranks)
        found = added(arrangement, own, x)
        for layer, outputs in enumerate(OUTPUTS):
            for row, adapter in enumerate(adapter_B):
                low_rank = (own if adapter == POLICY else ADAPTERS[adapter])[layer]
                expected = np.zeros(outputs)
                if low_rank is not None:
                    expected = low_rank.scale * (x[row] @ low_rank.a.array @ low_rank.b.array)
                np.testing.assert_allclose(found[layer][row], expected, atol=1e-4)


def test_rows_are_sorted_only_if_that_joins_rows_with_matrices() -> None:
    """The copies that sorting needs would slow down rows of the base model, which have no products."""
    for adapter_B in ((1, 1, 2), (2, 1, 3), (BASE, 1, BASE, 2, BASE), (BASE, BASE)):
        x = random_rows(len(adapter_B), 2)
        assert arranged(adapter_B).sorted(x) is x
    arrangement, x = arranged((1, BASE, 2, 1)), random_rows(4, 2)
    assert [(one.rows.start, one.rows.stop, bool(one.groups)) for one in arrangement.segments] == [
        (0, 1, False),
        (1, 3, True),
        (3, 4, True),
    ]
    np.testing.assert_array_equal(arrangement.by_slot(arrangement.sorted(x)), x)


def test_layers_that_read_the_same_input_share_one_product() -> None:
    """Their matrices A are one matrix, except those of the policy, which a weight swap replaces."""
    joined, separate = grouped(ADAPTERS[1], joins=True), grouped(ADAPTERS[1], joins=False)
    assert joined is not None
    assert separate is not None
    ((columns, a),) = joined.a
    assert (columns, a.array.shape, joined.rank) == (slice(0, 5), (INPUTS, 5), 5)
    assert [part.columns for part in joined.parts] == [slice(0, 2), slice(2, 5)]
    assert [one.address for _, one in separate.a] == [one.a.address for one in ADAPTERS[1] if one is not None]
