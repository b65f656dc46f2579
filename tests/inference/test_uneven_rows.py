"""Batches of short and long rows: short rows do not compute the columns of long ones, and removed slots leave room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from attachments.cpu.decoder import RunAttention
from attachments.cpu.kv_cache import HostKVCache
from attachments.cpu.tests.supported_models import Rows, plain_source
from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import CacheLayout
from clotho.inference.engine import DecodeEngine
from clotho.inference.kv_cache import BatchKVCache
from clotho.inference.row_runs import MIN_UNEVEN_COLUMNS
from protocols.sampling import Sampling
from tests.inference.engine_helpers import (
    RecordedEvents,
    complete_alone,
    make_engine,
    make_prompt,
    run,
    submit_request,
    tick_until,
)
from tests.small_models import tiny_source

LONG_PROMPT = 2 * MIN_UNEVEN_COLUMNS


@pytest.fixture(autouse=True)
def worth_dividing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide rows also where little is saved, and store every prompt per row."""
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SAVED_SCORES", 64)
    monkeypatch.setattr("clotho.inference.row_runs.MIN_RUN_BYTES", {"cpu": 1})
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SHARED_TOKENS", 10**9)


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
    rows = Rows(layout.model, 4, cache=BatchKVCache(layout, 4, 10**6))
    rows.enter([0], make_prompt(LONG_PROMPT))
    for slot in (1, 2, 3):
        rows.enter([slot], make_prompt(6, slot))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    rows.check_step()
    assert lengths_of(shapes) >= {(1, LONG_PROMPT), (3, 6)}
    assert (4, LONG_PROMPT) not in lengths_of(shapes)


@pytest.mark.needs_cpu_path
def test_a_step_on_the_host_reads_the_columns_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of groups that share a prompt, one part of which is in another run."""
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SHARED_TOKENS", 1)
    runs: list[tuple[int, int]] = []
    usual = RunAttention.__init__

    def recorded(self: RunAttention, one: Any, *arrays: Any) -> None:
        runs.append((one.run.rows.stop - one.run.rows.start, one.run.columns))
        usual(self, one, *arrays)

    rows = Rows(plain_source("qwen3").model, 6)
    rows.enter([0], make_prompt(LONG_PROMPT))
    rows.enter([1, 2, 3, 4, 5], make_prompt(20))
    rows.check_step()
    rows.take([5, 4, 0, 3, 2, 1])
    monkeypatch.setattr(RunAttention, "__init__", recorded)
    rows.check_step()
    assert runs == [(2, 2), (1, LONG_PROMPT + 1), (3, 2)]


def positions(engine: DecodeEngine) -> list[int]:
    """Number of tokens of each slot."""
    return [int(tokens) for tokens in engine._short.batch.table.positions]


@pytest.mark.usefixtures("read_mode")
def test_rows_are_ordered_by_length_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the order has cost as much as a copy of the KV cache. Completions do not change."""
    scores = 3 * LONG_PROMPT  # of the short rows between two long ones, a run saves less; of all short rows, more
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SAVED_SCORES", scores)
    monkeypatch.setattr("clotho.inference.kv_cache.min_saved_scores", lambda token_bytes: scores)
    monkeypatch.setattr("clotho.inference.engine.short_tokens", lambda *_: 2 * LONG_PROMPT)  # one batch
    source = tiny_source()
    engine = make_engine(source, max_num_seqs=12)
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    answers: dict[tuple[int, ...], RecordedEvents] = {}

    def all_run() -> bool:
        return engine.running == len(answers)

    for i in range(12):
        prompt = make_prompt(LONG_PROMPT if i % 3 == 2 else 7, i)
        answers[prompt] = submit_request(engine, prompt, sampling)
        tick_until(engine, all_run)
    assert positions(engine) != sorted(positions(engine), reverse=True)
    tick_until(engine, lambda: positions(engine) == sorted(positions(engine), reverse=True))
    assert engine.running == 12
    run(engine)
    for prompt, answer in answers.items():
        assert answer.completions[0].tokens == complete_alone(source, prompt, sampling).tokens


@pytest.mark.needs_cpu_path
def test_removed_slots_leave_room_for_rows_that_join() -> None:
    """Rows join the buffers that others have left, whose values are cleared. Nothing is allocated."""
    rows = Rows(plain_source("qwen3").model, 8)
    for slot in range(8):
        rows.enter([slot], make_prompt(9 + slot, slot))
    buffers, tokens = buffer(rows.cache), rows.cache.tokens
    for keys, values in rows.cache._columns:
        keys[:, 6] = values[:, 6] = np.nan
    rows.take([1, 2, 4, 7])
    rows.check_step()
    rows.cache.grow(3)
    rows.tokens, rows.live_B = [*rows.tokens, (0,), (0,), (0,)], np.append(rows.live_B, [False] * 3)
    rows.enter([4, 6], make_prompt(5))
    rows.check_step()
    assert (buffer(rows.cache), rows.cache.tokens) == (buffers, tokens)


@pytest.mark.needs_cpu_path
def test_buffers_of_which_little_is_left_become_smaller() -> None:
    """When most slots are removed."""
    rows = Rows(plain_source("qwen3").model, 16)
    for slot in range(16):
        rows.enter([slot], make_prompt(9, slot))
    rows.take([3])
    assert rows.cache.tokens == rows.cache.capacity
    rows.check_step()


def buffer(cache: HostKVCache) -> int:
    """Return the address of the keys of the first layer."""
    address: int = cache._columns[0][0].__array_interface__["data"][0]
    return address
