"""What filters must keep, wherever they are computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from clotho.inference.rows import PADDING
from protocols.sampling import Sampling
from tests.inference.engine_helpers import processed_logprobs

Kept = Callable[[np.ndarray, list[Sampling]], np.ndarray]
"""Returns which tokens the filters of every row keep."""

_MIXED = (
    Sampling(top_k=7), Sampling(), Sampling(top_p=0.8), Sampling(top_k=30, top_p=0.9, min_p=0.02), Sampling(min_p=0.1),
    Sampling(top_p=1e-6),
)  # fmt: skip

FILTERED = [
    pytest.param(_MIXED, id="mixed"),
    pytest.param(_MIXED[:1], id="top-k"),
    pytest.param(_MIXED[3:4], id="all three"),
]
"""Settings of the rows of a batch."""


def check_filters(kept: Kept, settings: tuple[Sampling, ...]) -> None:
    """Compare each row with the reference, with many equal logits and without."""
    rows = [settings[row % len(settings)] for row in range(48)]
    random_B_V = np.random.default_rng(5).normal(size=(48, 300)).astype(np.float32) * 2
    for x_B_V in (random_B_V, np.round(random_B_V)):
        expected = [
            processed_logprobs(x_V.astype(np.float64), (), s) > -np.inf for x_V, s in zip(x_B_V, rows, strict=True)
        ]
        np.testing.assert_array_equal(kept(x_B_V, rows), expected)


def check_limits_of_filters(kept: Kept) -> None:
    """Check impossible tokens among the most probable, and a filter that is too weak for float32."""
    x_B_V = np.full((1, 20), -np.inf, dtype=np.float32)
    x_B_V[0, [3, 11]] = 1.0, 0.5
    assert np.flatnonzero(kept(x_B_V, [Sampling(top_k=5)])[0]).tolist() == [3, 11]
    assert kept(np.zeros((2, 8), dtype=np.float32), [Sampling(min_p=1e-46), Sampling()]).all()


def check_supports(support_tokens: Callable[[np.ndarray, int], np.ndarray]) -> None:
    """Check that supports are ascending and padded at the end, of the whole width and of one token."""
    x_R_V = np.full((3, 10), -np.inf, dtype=np.float32)
    x_R_V[0, [9, 2, 5]], x_R_V[1, 4], x_R_V[2, :4] = 1.0, -3.0, 0.0
    found = support_tokens(x_R_V, 4)
    assert found.dtype == np.uint32
    assert found.tolist() == [[2, 5, 9, PADDING], [4] + [PADDING] * 3, [0, 1, 2, 3]]
