"""Counter-based random numbers."""

from __future__ import annotations

import numpy as np

from clotho.inference.sampling import uniforms


def grid(seeds: int, positions: int) -> np.ndarray:
    """Uniforms of all pairs of the first seeds and positions, (seeds, positions, 2)."""
    seed, position = np.meshgrid(np.arange(seeds), np.arange(positions), indexing="ij")
    return uniforms(seed.ravel().astype(np.uint64), position.ravel().astype(np.int64)).reshape(seeds, positions, 2)


def test_a_uniform_depends_on_seed_and_position_alone() -> None:
    """The order and number of rows sampled together do not matter."""
    together = grid(5, 7)
    one = uniforms(np.array([3], dtype=np.uint64), np.array([4], dtype=np.int64))
    np.testing.assert_array_equal(together[3, 4], one[0])


def test_uniforms_lie_strictly_inside_the_unit_interval() -> None:
    """In float32, where 0 and 1 would draw a token of probability zero."""
    u = uniforms(np.array([0, 2**64 - 1], dtype=np.uint64), np.array([0, 2**40], dtype=np.int64), lanes=1000)
    assert u.dtype == np.float32
    assert u.min() > 0.0
    assert u.max() < 1.0


def test_uniforms_are_uniform_and_uncorrelated_along_seeds_positions_and_lanes() -> None:
    """Neighbouring seeds and positions, which are what a group uses, give unrelated numbers."""
    u = grid(300, 200).astype(np.float64)
    counts, _ = np.histogram(u, bins=64, range=(0, 1))
    expected = u.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * np.sqrt(126)
    centred = u - 0.5
    bound = 5 / 12 / np.sqrt(u.size / 2)
    for a, b in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:]), (centred[..., 0], centred[..., 1])):
        assert abs((a * b).mean()) < bound
