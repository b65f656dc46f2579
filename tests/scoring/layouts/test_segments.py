"""Which completions go through the blocks together."""

from __future__ import annotations

import numpy as np
import pytest

from clotho.scoring.layouts.shared_prefix import PASS_COST, segments
from tests import model_lanes
from tests.scoring.layouts.reference_scores import largest_error, policy_of, random_sequences, the_plain_way, the_way_of


def cut(*lengths: int) -> list[tuple[list[int], int]]:
    """Rows and columns of each stretch."""
    return [(part.rows.tolist(), part.columns) for part in segments(np.array(lengths, dtype=np.int32))]


def test_rows_of_like_lengths_come_together() -> None:
    """Longest first, each stretch as wide as the bucket of its longest row; rows stay in their order."""
    assert cut(8, 400, 5, 410, *[7] * 4) == [([1, 3], 416), ([0, 2, 4, 5, 6, 7], 8)]


def test_a_pass_of_its_own_must_save_its_price() -> None:
    """Rows of 8 beside rows of 40: worth a pass where they save more than `PASS_COST` positions."""
    few, many = PASS_COST // 32, PASS_COST // 32 + 1
    assert [len(cut(40, *[8] * count)) for count in (few, many)] == [1, 2]


def test_no_completions_are_no_pass() -> None:
    """As where all completions are of one token."""
    assert cut() == []


def test_every_row_has_its_place() -> None:
    """Whatever the lengths, segments are a partition, and no row is longer than its columns."""
    length_B = np.random.default_rng(0).integers(1, 700, 200, dtype=np.int32)
    parts = segments(length_B)
    assert len(parts) > 2
    assert sorted(row for part in parts for row in part.rows) == list(range(200))
    assert all((length_B[part.rows] <= part.columns).all() for part in parts)


@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_stretches_change_no_result(monkeypatch: pytest.MonkeyPatch, grad_checkpoint: bool) -> None:
    """Log-probabilities, loss and gradients are those of the plain way, also of prompts in several segments."""
    shapes = ((5, (30, 3, 1, 18)), (12, (4, 26)), (3, (1, 1)))
    monkeypatch.setattr("clotho.scoring.layouts.shared_prefix.PASS_COST", 1)
    policy = policy_of("qwen3", grad_checkpoint=grad_checkpoint)
    found = the_way_of("shared", policy, random_sequences(shapes), budget=1000)
    assert largest_error(the_plain_way(policy_of("qwen3"), random_sequences(shapes)), found) < model_lanes.rtol(1e-5)
