"""Several sequences to a row."""

from __future__ import annotations

import numpy as np

from clotho.models.attention import AttentionLayers
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.layouts.rows import PackedInputs, PackedKeys
from tests.scoring.layouts.reference_scores import random_sequences


def test_rows_are_as_long_as_the_longest_sequence_and_filled_first_fit() -> None:
    """Inputs 13, 9, 4, 3, 2 in rows of 16: 13 + 3, then 9 + 4 + 2."""
    sequences = random_sequences(((1, (13, 9, 4, 3, 2)),))
    (micro,) = build_micro_batches(sequences, layout="packed", budget=100)
    assert isinstance(micro.inputs, PackedInputs)
    assert micro.members == (0, 3, 1, 2, 4)
    assert micro.inputs.start_R_S.tolist() == [[0] * 13 + [13] * 3, [0] * 9 + [9] * 4 + [13] * 2 + [15]]


def test_a_row_that_does_not_fit_the_budget_goes_to_the_next_micro_batch_with_its_own_length() -> None:
    """One row of 16 at a time; then what is left in rows of 8."""
    sequences = random_sequences(((1, (13, 9, 8)),))
    batches = build_micro_batches(sequences, layout="packed", budget=16)
    assert [micro.inputs[0].shape for micro in batches] == [(1, 16), (1, 16), (1, 8)]


def test_a_query_sees_its_own_sequence_up_to_itself_and_the_window() -> None:
    """Two sequences, of two and three tokens, in a row of six; with a window of two tokens."""
    start_1_S = np.array([[0, 0, 2, 2, 2, 5]], dtype=np.int32)
    keys = PackedKeys(start_1_S, AttentionLayers(caches=(0,), mask_axes=4), offset=0)
    plain = ["100000", "110000", "001000", "001100", "001110", "000001"]
    window = ["100000", "110000", "001000", "001100", "000110", "000001"]
    for expected, size in ((plain, None), (window, 2)):
        mask = np.array(keys.make_mask(6, window_size=size))
        assert mask.shape == (1, 1, 6, 6)
        assert ["".join(str(int(seen)) for seen in row) for row in mask[0, 0]] == expected
