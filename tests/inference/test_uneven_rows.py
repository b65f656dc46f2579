"""Batches of short and long rows in MLX: short rows do not compute the columns of long ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import CacheLayout
from clotho.inference.kv_cache import BatchKVCache
from clotho.inference.row_runs import MIN_UNEVEN_COLUMNS
from tests.inference.cache_rows import Rows, check_order
from tests.inference.engine_helpers import make_prompt
from tests.small_models import tiny_source

LONG_PROMPT = 2 * MIN_UNEVEN_COLUMNS


@pytest.fixture(autouse=True)
def worth_dividing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide rows also where little is saved."""
    monkeypatch.setattr("clotho.inference.row_runs.MIN_RUN_BYTES", {"cpu": 1})


def lengths_of(shapes: Sequence[tuple[int, ...]]) -> set[tuple[int, int]]:
    """Return numbers of rows and columns of keys of the shape (rows, heads, columns, size)."""
    return {(shape[0], shape[2]) for shape in shapes}


@pytest.mark.usefixtures("device_path")
def test_a_step_in_mlx_reads_the_columns_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer, the result is that of a full forward pass of each row."""
    shapes: list[tuple[int, ...]] = []
    usual: Any = mx.fast.scaled_dot_product_attention

    def recorded(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        shapes.append(keys.shape)
        result: mx.array = usual(queries, keys, values, **options)
        return result

    layout = CacheLayout(tiny_source("qwen3").model)
    probe_batching(layout)
    rows = Rows(layout.model, 4, BatchKVCache(layout, 4, 10**6))
    rows.enter([0], make_prompt(LONG_PROMPT))
    for slot in (1, 2, 3):
        rows.enter([slot], make_prompt(6, slot))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    rows.check_step()
    assert lengths_of(shapes) >= {(1, LONG_PROMPT), (3, 6)}
    assert (4, LONG_PROMPT) not in lengths_of(shapes)


@pytest.mark.usefixtures("mlx_decoder", "read_mode")
def test_rows_are_ordered_by_length_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the order has cost as much as a copy of the KV cache. Completions do not change."""
    scores = 3 * LONG_PROMPT  # of the short rows between two long ones, a run saves less; of all short rows, more
    monkeypatch.setattr("clotho.inference.kv_cache.min_saved_scores", lambda token_bytes: scores)
    monkeypatch.setattr("clotho.inference.engine.short_tokens", lambda *_: 2 * LONG_PROMPT)  # one batch
    check_order(LONG_PROMPT)
