"""Random numbers that depend on nothing but (seed, position): a row draws the same whatever its neighbours do.

SplitMix64 (Steele, Lea, Flood, 2014) used as a counter-based generator: its finaliser hashes a counter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

MANTISSA_BITS = 23
"""Mid-points of 2**23 equal cells are exact in float32 and lie strictly inside (0, 1)."""


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finaliser: a bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def uniforms(seed_B: NDArray[np.uint64], position_B: NDArray[np.int64], lanes: int = 2) -> NDArray[np.float32]:
    """Return `lanes` independent uniforms per row, shape (B, lanes), float32, each in [2**-24, 1 - 2**-24].

    A pure function of (seed, position, lane): position is the index of the token within its completion.
    """
    counter_B_L = position_B.astype(np.uint64)[:, None] * np.uint64(lanes) + np.arange(1, lanes + 1, dtype=np.uint64)
    word_B_L = mix(np.add(mix(seed_B)[:, None], counter_B_L * GOLDEN, dtype=np.uint64))
    cell_B_L = (word_B_L >> np.uint64(64 - MANTISSA_BITS)).astype(np.float32)
    return (cell_B_L + np.float32(0.5)) * np.float32(2.0**-MANTISSA_BITS)
