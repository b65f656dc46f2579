"""The filters as a mask and as numbers, on the device and in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from clotho.cpu.interface import PADDING
from clotho.cpu.sampling import apply_filters
from clotho.cpu.sampling import support_tokens as support_tokens_on_cpu
from clotho.inference.sampling import filter_mask, row_parameters, support_tokens
from protocols.sampling import Sampling
from tests.inference.engine_helpers import processed

Kept = Callable[[np.ndarray, list[Sampling]], np.ndarray]

FILTERED = (
    Sampling(top_k=7),
    Sampling(),
    Sampling(top_p=0.8),
    Sampling(top_k=30, top_p=0.9, min_p=0.02),
    Sampling(min_p=0.1),
    Sampling(top_p=1e-6),
)


def kept_on_host(x_B_V: np.ndarray, settings: list[Sampling]) -> np.ndarray:
    """Say which tokens keep their logits in NumPy."""
    filters = row_parameters(settings, x_B_V.shape[1]).filters
    assert filters is not None
    left_B_V = x_B_V.copy()
    apply_filters(left_B_V, filters)
    kept_B_V = left_B_V > -np.inf
    np.testing.assert_array_equal(left_B_V[kept_B_V], x_B_V[kept_B_V])
    return kept_B_V


def kept_on_device(x_B_V: np.ndarray, settings: list[Sampling]) -> np.ndarray:
    """Say which tokens the mask keeps, of those that are possible at all."""
    filters = row_parameters(settings, x_B_V.shape[1]).filters
    assert filters is not None
    return np.array(filter_mask(mx.array(x_B_V), filters)) & (x_B_V > -np.inf)


def test_top_k_keeps_exactly_k_among_ties() -> None:
    """Of equal logits the lower token ids are kept."""
    plan = row_parameters([Sampling(top_k=3), Sampling(top_p=0.5)], 8)
    assert plan.filters is not None
    kept = np.array(filter_mask(mx.zeros((2, 8)), plan.filters))
    np.testing.assert_array_equal(kept[0], np.arange(8) < 3)
    np.testing.assert_array_equal(kept[1], np.arange(8) < 4)


@pytest.mark.parametrize("kept", [kept_on_host, kept_on_device])
@pytest.mark.parametrize("settings", [FILTERED, FILTERED[:1], FILTERED[3:4]], ids=["mixed", "top-k", "all three"])
def test_what_survives_is_what_the_documentation_says(kept: Kept, settings: tuple[Sampling, ...]) -> None:
    """Row for row the support of the slow, obvious twin, whatever the neighbours; and also where many logits tie."""
    rows = [settings[row % len(settings)] for row in range(48)]
    random_B_V = np.random.default_rng(5).normal(size=(48, 300)).astype(np.float32) * 2
    for x_B_V in (random_B_V, np.round(random_B_V)):
        expected = [processed(x_V.astype(np.float64), (), s) > -np.inf for x_V, s in zip(x_B_V, rows, strict=True)]
        np.testing.assert_array_equal(kept(x_B_V, rows), expected)


@pytest.mark.parametrize("kept", [kept_on_host, kept_on_device])
def test_impossible_tokens_do_not_fill_up_a_support(kept: Kept) -> None:
    """A token of logit minus infinity cannot be sampled, though it is among the likeliest k."""
    x_B_V = np.full((1, 20), -np.inf, dtype=np.float32)
    x_B_V[0, [3, 11]] = 1.0, 0.5
    assert np.flatnonzero(kept(x_B_V, [Sampling(top_k=5)])[0]).tolist() == [3, 11]


@pytest.mark.parametrize("kept", [kept_on_host, kept_on_device])
def test_a_filter_too_weak_for_float32_leaves_every_token(kept: Kept) -> None:
    """The smallest min-p is 0 as a float32, and no other row has a filter."""
    assert kept(np.zeros((2, 8), dtype=np.float32), [Sampling(min_p=1e-46), Sampling()]).all()


def test_supported_tokens_are_ascending_and_padded_at_the_end() -> None:
    """On the device and on the host alike; a row may fill the whole width, or keep a single token."""
    x_R_V = np.full((3, 10), -np.inf, dtype=np.float32)
    x_R_V[0, [9, 2, 5]], x_R_V[1, 4], x_R_V[2, :4] = 1.0, -3.0, 0.0
    expected = [[2, 5, 9, PADDING], [4] + [PADDING] * 3, [0, 1, 2, 3]]
    for found in (np.array(support_tokens(mx.array(x_R_V), 4)), support_tokens_on_cpu(x_R_V, 4)):
        assert found.dtype == np.uint32
        assert found.tolist() == expected
