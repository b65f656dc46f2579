"""The KV cache in MLX writes columns in place, and allocates them for whole completions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import CacheLayout
from clotho.inference.engine import DecodeEngine
from clotho.inference.kv_cache import BatchKVCache, ColumnState
from clotho.inference.rows import rounded_columns
from protocols.sampling import Sampling
from tests.inference.cache_rows import Rows
from tests.inference.engine_helpers import make_engine, make_prompt, submit_request, tick_until
from tests.small_models import tiny_source


@pytest.mark.needs_float32
@pytest.mark.usefixtures("mlx_decoder", "read_mode")
@pytest.mark.parametrize("architecture", ["gemma2", "qwen3"])
def test_columns_are_written_in_place(architecture: str) -> None:
    """MLX copies no buffer between decode steps."""
    engine = make_engine(tiny_source(architecture))
    submit_request(engine, make_prompt(8), Sampling(max_tokens=30, ignore_eos=True), (1, 2))
    tick_until(engine, lambda: engine.running == 2)
    buffers = set()
    for _ in range(6):
        engine.tick()
        mx.synchronize()
        cache: Any = engine._short.batch._cache
        keys = np.array(cache.leaves[0].keys[0], copy=False)
        buffers.add(keys.__array_interface__["data"][0])
    assert len(buffers) == 1


def buffers(engine: DecodeEngine) -> int:
    """Return the number of columns that the buffers of the running rows have."""
    cache = engine._short.batch._cache
    assert isinstance(cache, BatchKVCache)
    columns: int = cache.leaves[0].keys[0].shape[2]
    return columns


@pytest.mark.usefixtures("device_path")
def test_buffers_are_allocated_for_whole_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of a batch of rollouts have as many columns as its rows can use and are never moved."""
    engine = make_engine()
    submit_request(engine, make_prompt(8), Sampling(max_tokens=200, ignore_eos=True), (1, 2), background=True)
    tick_until(engine, lambda: engine.running == 2)
    monkeypatch.delattr(ColumnState, "move")
    columns = set()
    while engine.running == 2:
        columns.add(buffers(engine))
        engine.tick()
    assert columns == {256}


def test_buffers_have_one_of_few_sizes() -> None:
    """So that MLX reuses one that was freed: powers of two up to 128 columns, then multiples of 256."""
    assert [rounded_columns(columns) for columns in (1, 64, 65, 128, 129, 256, 257, 1000)] == [
        64, 64, 128, 128, 256, 256, 512, 1024,
    ]  # fmt: skip


@pytest.mark.usefixtures("device_path")
def test_buffers_ahead_are_within_the_limit_on_the_kv_cache() -> None:
    """Rows of different age would need more columns than either: long ones behind the current one, new ones ahead."""
    engine = make_engine(kv_cache_tokens=480)
    sampling = Sampling(max_tokens=120, ignore_eos=True)
    answer = submit_request(engine, make_prompt(120), sampling)
    for _ in range(100):
        engine.tick()
    submit_request(engine, make_prompt(120, 1), sampling)
    while engine.has_work:
        engine.tick()
        assert engine.stats().cache_tokens <= 480
    assert len(answer.completions[0].tokens) == 120


@pytest.mark.usefixtures("device_path")
@pytest.mark.parametrize("unequal", [True, False])
def test_a_step_builds_one_contiguous_mask(unequal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers get the same array with an axis for query heads, which Metal need not copy; equal rows need none."""
    masks: list[mx.array | None] = []
    usual: Any = mx.fast.scaled_dot_product_attention

    def recorded(*args: mx.array, mask: mx.array | None, **options: Any) -> mx.array:
        masks.append(mask)
        result: mx.array = usual(*args, mask=mask, **options)
        return result

    layout = CacheLayout(tiny_source("qwen3").model)
    probe_batching(layout)
    rows = Rows(layout.model, 2, BatchKVCache(layout, 2, 1000))
    rows.enter([0], make_prompt(9))
    rows.enter([1], make_prompt(5 if unequal else 9, 1))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    rows.step()
    first, second = masks
    assert first is second
    assert (first is not None) == unequal
    if first is not None:
        assert first.shape == (2, layout.model.args.num_attention_heads, 1, 9)
        assert np.array(first, copy=False).flags.c_contiguous
