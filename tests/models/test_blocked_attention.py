"""Attention in blocks of queries against attention in one piece."""

from __future__ import annotations

import gc
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from clotho.models import attention as whole_sequences
from clotho.models import blocked_attention as blocks
from clotho.models.attention import LayerKeys, attention, install_cache_attention
from clotho.models.blocked_attention import VisibleKeys, causal
from tests import model_lanes

B, HEADS, KEY_HEADS, Q, P, SIZE = 2, 4, 2, 37, 12, 8


def in_blocks(monkeypatch: pytest.MonkeyPatch, queries: int = 8) -> None:
    """Compute all attention in blocks of some queries."""
    install_cache_attention()
    monkeypatch.setattr(blocks, "MOST_KEYS", 0)
    monkeypatch.setattr(blocks, "QUERIES", queries)


def positions(rows: int, count: int) -> NDArray[np.int32]:
    """Row by row."""
    return np.broadcast_to(np.arange(count, dtype=np.int32), (rows, count))


def packed_starts() -> NDArray[np.int32]:
    """Sequences that begin at other columns in each row."""
    column_B_Q = positions(B, Q)
    return np.where(column_B_Q < np.array([[11], [20]]), 0, np.array([[11], [20]])).astype(np.int32)


def after_a_prompt(window_size: int | None) -> VisibleKeys:
    """Completions whose prompts have 12 and 5 tokens, padded to 12."""
    length_B_1 = np.array([[P], [5]], dtype=np.int32)
    prompt_B_P = np.where(positions(B, P) < length_B_1, positions(B, P), np.int32(2**31 - 1))
    own_B_Q = length_B_1 + positions(B, Q)
    return VisibleKeys(own_B_Q, np.concatenate([prompt_B_P, own_B_Q], axis=1), window_size=window_size)


MASKS: dict[str, Any] = {
    "causal": "causal",
    "window": causal(Q, Q, 5),
    "window of an array": causal(Q, Q, 5).whole,
    "packed": VisibleKeys(positions(B, Q), positions(B, Q), first_B_Q=packed_starts()),
    "packed, window": VisibleKeys(positions(B, Q), positions(B, Q), first_B_Q=packed_starts(), window_size=6),
    "prompt": after_a_prompt(None),
    "prompt, window": after_a_prompt(9),
}


def results(mask: Any, seed: int, *, sinks: bool = False, dtype: mx.Dtype = mx.float32) -> list[NDArray[np.float32]]:
    """Values of attention, and the gradients of queries, keys, values and sinks."""
    after = P if isinstance(mask, VisibleKeys) and mask.whole.shape[-1] == P + Q else 0
    shapes = [(B, HEADS, Q, SIZE), *[(B, KEY_HEADS, Q + after, SIZE)] * 2, *[(HEADS,)] * sinks, (B, HEADS, Q, SIZE)]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    *arrays, cotangent = (
        mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)
    )

    def attend(queries: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None = None) -> mx.array:
        return attention(queries, keys, values, LayerKeys(), 0.4, mask, sinks)

    values, gradients = mx.vjp(attend, arrays, [cotangent])
    return [model_lanes.numpy(array.astype(mx.float32)) for array in (*values, *gradients)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_those_of_one_piece(monkeypatch: pytest.MonkeyPatch, mask: str, sinks: bool) -> None:
    """For any mask, with heads that share keys, within 1e-5 of the largest number; eight seeds."""
    for seed in range(8):
        expected = results(MASKS[mask], seed, sinks=sinks)
        with monkeypatch.context() as patched:
            in_blocks(patched)
            found = results(MASKS[mask], seed, sinks=sinks)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def test_gradients_of_sixteen_bits_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of keys that many blocks attend to are as close to the exact ones as those of one piece."""
    exact, whole = (results("causal", 0, dtype=dtype) for dtype in (mx.float32, mx.bfloat16))
    in_blocks(monkeypatch, queries=1)
    for one, other, right in zip(results("causal", 0, dtype=mx.bfloat16), whole, exact, strict=True):
        assert np.sqrt(np.mean((one - right) ** 2)) <= 1.2 * np.sqrt(np.mean((other - right) ** 2))


def test_keys_that_no_query_of_a_block_attends_to_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later keys, keys before the window or the sequence, and the padding of prompts."""
    monkeypatch.setattr(blocks, "QUERIES", 4)

    def columns(visible: VisibleKeys) -> list[tuple[int, int]]:
        return [(seen.start, seen.stop) for _, seen in visible.spans]

    assert columns(causal(10, 10)) == [(0, 4), (0, 8), (0, 10)]
    assert columns(causal(10, 10, 3)) == [(0, 4), (2, 8), (6, 10)]
    start_1_Q = np.array([[0, 0, 0, 0, 4, 4, 4, 4, 4, 9]], dtype=np.int32)
    assert columns(VisibleKeys(positions(1, 10), positions(1, 10), first_B_Q=start_1_Q)) == [(0, 4), (4, 8), (4, 10)]


def test_masks_that_cannot_be_divided_are_left_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are added, which may have a gradient, and masks that have one row for all queries."""
    in_blocks(monkeypatch)
    monkeypatch.setattr(whole_sequences, "blocked_attention", None)
    x = mx.random.normal((B, HEADS, Q, SIZE))
    for mask in (mx.zeros((Q, Q)), mx.ones((B, 1, 1, Q), dtype=mx.bool_), None):
        assert attention(x, x, x, None, 0.4, mask).shape == x.shape


def peak(length: int) -> int:
    """Most bytes that attention over a sequence and its gradient hold beside their arguments.

    The median of several runs: MLX frees an array before or after the next one is allocated, as its threads run.
    """
    return int(median(one_peak(length) for _ in range(7)))


def one_peak(length: int) -> int:
    """The same of one run."""
    arrays = [mx.random.normal((1, heads, length, SIZE)) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    mx.eval(arrays)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return attention(queries, keys, values, LayerKeys(), 0.4, "causal")

    mx.eval(mx.vjp(attend, arrays[:3], arrays[3:]))
    return int(mx.get_peak_memory()) - before


@pytest.mark.usefixtures("no_buffer_cache")
def test_memory_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the length takes at most eight times the memory in blocks, and over twelve times in one piece."""
    dense = one_peak(1024) / peak(256)
    in_blocks(monkeypatch, queries=64)
    assert peak(1024) / peak(256) < 8 < 12 < dense
