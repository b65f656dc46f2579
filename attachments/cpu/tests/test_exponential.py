"""The exponential of token scores."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from attachments.cpu.layers import exp


def test_it_is_numpys_up_to_rounding() -> None:
    """Relative to float64: within 4e-6 down to the smallest normal result, within 1e-6 where probabilities count."""
    x = np.linspace(-87.0, 20.0, 200_001, dtype=np.float32)
    result = np.array(exp(mx.array(x)))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, np.exp(x.astype(np.float64)), rtol=4e-6)
    near = x > -20.0
    np.testing.assert_allclose(result[near], np.exp(x[near].astype(np.float64)), rtol=1e-6)


def test_what_is_far_below_gives_zero_and_what_is_no_number_stays_none() -> None:
    """The lowest logit, minus infinity, NaN; and exactly 1 at zero, of either sign."""
    x = np.array([-np.inf, -3e38, -1e9, -110.0, 0.0, -0.0, np.inf, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(np.array(exp(mx.array(x))), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, np.inf, np.nan])
