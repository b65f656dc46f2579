"""The KV cache of the host path: free columns are used before it grows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from clotho.cpu.decoder import HostDecoder
from clotho.cpu.interface import PrefilledPrompt
from clotho.cpu.kv_cache import HostKVCache


@pytest.mark.parametrize(
    ("capacity", "column", "tokens", "has_room"),
    [(0, 0, 0, False), (8, 2, 3, False), (8, 3, 3, True), (8, 4, 3, True)],
)
def test_a_prompt_fits_to_the_left_of_the_current_column(
    capacity: int, column: int, tokens: int, *, has_room: bool
) -> None:
    """Into columns that exist: an empty cache has none."""
    cache = HostKVCache(cast(HostDecoder, SimpleNamespace(depth=1, key_shape=(1, 4))), rows=2)
    cache.capacity, cache.column = capacity, column
    prompt = PrefilledPrompt(rows=1, tokens=tokens, state=None, reserved=8)
    assert cache.has_room([prompt]) is has_room
