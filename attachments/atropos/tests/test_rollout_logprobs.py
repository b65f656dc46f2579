"""Trained spans, and policy versions of tokens between them."""

from __future__ import annotations

import numpy as np
import pytest

from attachments.atropos.sample_log import SampledSequence, token_versions, trained_spans


@pytest.mark.parametrize(
    ("trained", "expected"),
    [([0, 0, 0], []), ([1, 1, 1], [(0, 3)]), ([0, 1, 1, 0, 1], [(1, 3), (4, 5)]), ([1, 0, 0, 1], [(0, 1), (3, 4)])],
)
def test_spans_are_maximal(trained: list[int], expected: list[tuple[int, int]]) -> None:
    """Each span is one turn of the policy."""
    assert trained_spans(np.array(trained, dtype=bool)) == expected


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ([0, 0, 0, 0], [9, 9, 9, 9]),
        ([0, 1, 0, 1], [4, 4, 4, 6]),
        ([1, 0, 0, 0], [3, 3, 3, 3]),
        ([0, 0, 1, 0], [5, 5, 5, 5]),
    ],
)
def test_other_tokens_take_the_version_of_the_sampled_token_before(trained: list[int], expected: list[int]) -> None:
    """Tokens before the first sampled token take its version."""
    version_T = np.array([3, 4, 5, 6] if any(trained) else [9] * 4, dtype=np.int32)
    sequence = SampledSequence(
        logprob_T=np.zeros(4, dtype=np.float32),
        version_T=version_T,
        unrecorded=[],
        missing=[],
        supports={},
        temperature=1.0,
    )
    assert token_versions(sequence, np.array(trained, dtype=bool)).tolist() == expected
