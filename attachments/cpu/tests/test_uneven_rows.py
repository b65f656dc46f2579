"""Short rows do not compute the columns of long ones on the host, and removed slots leave room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attachments.cpu.attention import RunAttention
from attachments.cpu.kv_cache import HostKVCache
from attachments.cpu.tests.supported_models import host_rows, plain_source
from clotho.inference.row_runs import MIN_UNEVEN_COLUMNS
from tests.inference.cache_rows import check_order
from tests.inference.engine_helpers import make_prompt

pytestmark = pytest.mark.needs_cpu_path

LONG_PROMPT = 2 * MIN_UNEVEN_COLUMNS


@pytest.fixture(autouse=True)
def worth_dividing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide rows also where little is saved, and store every prompt per row."""
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SAVED_SCORES", 64)
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SHARED_TOKENS", 10**9)


def test_a_step_on_the_host_reads_the_columns_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of groups that share a prompt, one part of which is in another run."""
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SHARED_TOKENS", 1)
    runs: list[tuple[int, int]] = []
    usual = RunAttention.__init__

    def recorded(self: RunAttention, one: Any, *arrays: Any) -> None:
        runs.append((one.run.rows.stop - one.run.rows.start, one.run.columns))
        usual(self, one, *arrays)

    rows = host_rows(plain_source("qwen3").model, 6)
    rows.enter([0], make_prompt(LONG_PROMPT))
    rows.enter([1, 2, 3, 4, 5], make_prompt(20))
    rows.check_step()
    rows.take([5, 4, 0, 3, 2, 1])
    monkeypatch.setattr(RunAttention, "__init__", recorded)
    rows.check_step()
    assert runs == [(2, 2), (1, LONG_PROMPT + 1), (3, 2)]


def test_removed_slots_leave_room_for_rows_that_join() -> None:
    """Rows join the buffers that others have left, whose values are cleared. Nothing is allocated."""
    rows = host_rows(plain_source("qwen3").model, 8)
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


def test_buffers_of_which_little_is_left_become_smaller() -> None:
    """When most slots are removed."""
    rows = host_rows(plain_source("qwen3").model, 16)
    for slot in range(16):
        rows.enter([slot], make_prompt(9, slot))
    rows.take([3])
    assert rows.cache.tokens == rows.cache.capacity
    rows.check_step()


def buffer(cache: HostKVCache) -> int:
    """Return the address of the keys of the first layer."""
    address: int = cache._columns[0][0].__array_interface__["data"][0]
    return address


def test_rows_are_ordered_by_length_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the order has cost as much as a copy of the KV cache. Completions do not change."""
    scores = 3 * LONG_PROMPT  # of the short rows between two long ones, a run saves less; of all short rows, more
    monkeypatch.setattr("attachments.cpu.kv_cache.MIN_SAVED_SCORES", scores)
    monkeypatch.setattr("clotho.inference.engine.short_tokens", lambda *_: 2 * LONG_PROMPT)  # one batch
    check_order(LONG_PROMPT)
