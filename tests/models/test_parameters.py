"""The fingerprint of parameters changes with every bit and with nothing else."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from clotho.models import parameters as module
from clotho.models.parameters import AT_ONCE, BLOCK, fingerprint

LARGE = 2 * BLOCK * (AT_ONCE + 1) + 5
"""Float32 numbers of more than one round of blocks, and a rest."""

ELSEWHERE = """
import mlx.core as mx
from clotho.models.parameters import fingerprint
print(fingerprint({"w": mx.arange(200_000).astype(mx.float32)}))
"""


@pytest.fixture(scope="module")
def large() -> np.ndarray:
    """Return the bits of a large array."""
    return np.random.default_rng(0).integers(0, 2**32, LARGE, dtype=np.uint32)


def fingerprint_of(bits: np.ndarray, dtype: mx.Dtype = mx.float32) -> str:
    """Return the fingerprint of an array with these bits, NaN included."""
    return fingerprint({"w": mx.array(bits).view(dtype)})


@pytest.mark.parametrize(
    "place", [0, 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK * AT_ONCE, LARGE - 6, LARGE - 5, LARGE - 1]
)
def test_every_bit_changes_the_fingerprint(large: np.ndarray, place: int) -> None:
    """First and last words of blocks, of rounds and of the rest; a sign, a last digit, both signs of a word."""
    seen = {fingerprint_of(large)}
    for bit in (0, 13, 31):
        changed = large.copy()
        changed[place] ^= np.uint32(1 << bit)
        seen.add(fingerprint_of(changed))
    signs = large.copy()
    signs[[place, (place + 2 * BLOCK) % LARGE]] ^= np.uint32(1 << 31)
    assert len(seen | {fingerprint_of(signs)}) == 5


def test_two_changed_signs_in_one_block_do_not_cancel(large: np.ndarray) -> None:
    """2^63 (c_1 + c_2) is 0 mod 2^64 for odd c, so the formula needs its shift."""
    changed = large.copy()
    changed[[1, 3]] ^= np.uint32(1 << 31)
    assert fingerprint_of(changed) != fingerprint_of(large)


def test_the_fingerprint_equals_the_numpy_formula(large: np.ndarray) -> None:
    """The sums of the device are equal too."""
    words = large[: 2 * BLOCK].view(np.uint64)
    with np.errstate(over="ignore"):
        expected = ((words ^ (words >> np.uint64(32))) * np.array(module._constants())).sum(dtype=np.uint64)
    assert module._parts(mx.array(large[: 2 * BLOCK]))[0].item() == int(expected)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.uint8])
def test_narrow_types_are_hashed_by_their_bits(dtype: mx.Dtype) -> None:
    """For an odd number of values too. A row of blocks in another position gives another fingerprint."""
    bits = mx.array(np.random.default_rng(1).integers(0, 256, 3 * BLOCK * 8, dtype=np.uint8)).view(dtype)
    assert fingerprint({"w": bits[:-1]}) != fingerprint({"w": bits[1:]})
    assert fingerprint({"w": bits[1:]}) == fingerprint({"w": mx.contiguous(bits[1:])})


def test_names_types_and_shapes_count_and_order_does_not() -> None:
    """Empty branches do not count either."""
    a, b = mx.zeros((4, 2)), mx.ones((3,))
    one = fingerprint({"x": a, "y": b, "z": {}})
    assert one == fingerprint({"y": b, "x": a})
    others = [
        {"x": b, "y": a}, {"x": a, "q": b}, {"x": a.reshape(2, 4), "y": b}, {"x": a.astype(mx.int32), "y": b}, {"x": a},
    ]  # fmt: skip
    assert len({one, *map(fingerprint, others)}) == 6


def test_another_process_computes_the_same_fingerprint() -> None:
    """The constants are fixed."""
    here = fingerprint({"w": mx.arange(200_000).astype(mx.float32)})
    there = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


@pytest.mark.parametrize("rest", [1, 5, BLOCK + 1, 2 * BLOCK - 1])
def test_every_element_behind_the_last_whole_block_counts(rest: int) -> None:
    """Whether the array has one block or several, and however long the rest is."""
    for blocks in (1, 2):
        whole = 2 * BLOCK * blocks  # a block has 8-byte words
        values = np.arange(whole + rest, dtype=np.uint32)
        seen = {fingerprint_of(values)}
        for place in {whole, whole + rest // 2, whole + rest - 1}:
            changed = values.copy()
            changed[place] ^= np.uint32(1)
            seen.add(fingerprint_of(changed))
        assert len(seen) == 1 + len({whole, whole + rest // 2, whole + rest - 1})
