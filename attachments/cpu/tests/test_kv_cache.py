"""The KV cache of the host path: free columns are used before it grows, and columns are written in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from attachments.cpu import kv_cache
from attachments.cpu.decoder import HostDecoder
from attachments.cpu.decoder_layers import allocated
from attachments.cpu.kv_cache import HostKVCache
from clotho.inference.rows import PrefilledPrompt
from protocols.sampling import Sampling
from tests.inference.engine_helpers import make_engine, make_prompt, submit_request, tick_until

DECODER = cast(
    HostDecoder,
    SimpleNamespace(
        depth=1,
        key_shape=(1, 4),
        column_shapes=[(1, 4, 4)],
        state_shapes=[],
        divided=lambda layers: (list(layers), []),
        joined=lambda attention, _: list(attention),
    ),
)


@pytest.mark.parametrize(
    ("capacity", "column", "tokens", "has_room"), [(0, 0, 0, False), (8, 2, 3, False), (8, 3, 3, True), (8, 4, 3, True)]
)
def test_a_prompt_fits_to_the_left_of_the_current_column(
    capacity: int, column: int, tokens: int, *, has_room: bool
) -> None:
    """Into columns that exist: an empty cache has none."""
    cache = HostKVCache(DECODER, rows=2)
    cache.capacity, cache.column = capacity, column
    prompt = PrefilledPrompt(rows=1, tokens=tokens, state=None, reserved=8)
    assert cache.has_room([prompt]) is has_room


@pytest.mark.parametrize("slots", [[1, 0, 2, 3], [0, 2, 3], [3, 2, 1, 0], [0, 1]])
def test_rows_keep_their_columns_in_whatever_order_they_are_taken(slots: list[int]) -> None:
    """Slots whose place does not change lie before, between and behind those that move."""
    cache = HostKVCache(DECODER, rows=4)
    positions_B = np.full(4, 2, dtype=np.int32)
    cache.make_room(positions_B, np.zeros(4, dtype=np.bool_), [PrefilledPrompt(1, 2, None, 8)])
    for slot in range(4):
        keys = mx.full((1, 1, 2, 4), float(slot))
        cache.enter([slot], PrefilledPrompt(1, 2, ((keys, keys),), 8))
    cache.take(slots, positions_B[slots])
    found = [cache.state(row, 2)[0][0] for row in range(len(slots))]
    assert [np.unique(np.array(keys)).tolist() for keys in found] == [[float(slot)] for slot in slots]


def test_columns_move_into_the_buffers_that_layers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of buffers that keep their size, one is allocated for all layers; what rows hold moves along."""
    cache = HostKVCache(DECODER, rows=2)
    cache.make_room(np.zeros(2, np.int32), np.zeros(2, np.bool_), [PrefilledPrompt(1, 2, None, 8)])
    keys, values = mx.full((1, 1, 2, 4), 1.0), mx.full((1, 1, 2, 4), 2.0)
    cache.enter([0], PrefilledPrompt(1, 2, ((keys, values),), 8))
    tokens, counted = cache.tokens, Mock(wraps=allocated)
    monkeypatch.setattr(kv_cache, "allocated", counted)
    cache.make_room(np.array([2, 0], np.int32), np.array([True, False]), [PrefilledPrompt(1, 10, None, 16)])
    assert (cache.column, cache.tokens, counted.call_count) == (10, tokens, 1)
    assert [np.unique(np.array(one)).tolist() for one in cache.state(0, 2)[0]] == [[1.0], [2.0]]


def test_a_shared_prompt_is_freed_when_no_row_uses_it() -> None:
    """Not before: the other rows of the prompt still read it."""
    cache, keys = HostKVCache(DECODER, rows=2), mx.zeros((1, 1, 256, 4))
    cache.enter([0, 1], PrefilledPrompt(2, 256, ((keys, keys),), 8))
    tokens = [cache.tokens]
    for slot in range(2):
        cache.enter([slot], PrefilledPrompt(1, 0, None, 8))
        tokens.append(cache.tokens)
    assert tokens == [256, 256, 0]


@pytest.mark.needs_cpu_path
def test_columns_are_written_in_place() -> None:
    """No buffer is copied between decode steps."""
    engine = make_engine()
    submit_request(engine, make_prompt(8), Sampling(max_tokens=30, ignore_eos=True), (1, 2))
    tick_until(engine, lambda: engine.running == 2)
    buffers = set()
    for _ in range(6):
        engine.tick()
        cache = engine._short.batch._cache
        assert isinstance(cache, HostKVCache)
        buffers.add(cache._columns[0][0].__array_interface__["data"][0])
    assert len(buffers) == 1
