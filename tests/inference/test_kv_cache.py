"""The columns of the running rows stay where they are from step to step."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.cpu.kv_cache import HostKVCache
from protocols.sampling import Sampling
from tests.inference.engine_helpers import ask, make_engine, prompt_of, tick_until
from tests.small_models import tiny_source


@pytest.mark.parametrize("here", [True, False], ids=["sampled by the host", "sampled on the device"])
@pytest.mark.parametrize("architecture", ["gemma2", "qwen3"])
def test_columns_are_written_in_place(architecture: str, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is copied from one step to the next, neither MLX's nor the host's."""
    if not here:
        monkeypatch.setattr("clotho.inference.batch.can_sample_on_cpu", lambda plan: False)
    engine = make_engine(tiny_source(architecture))
    ask(engine, prompt_of(8), Sampling(max_tokens=30, ignore_eos=True), (1, 2))
    tick_until(engine, lambda: engine.running == 2)
    buffers = set()
    for _ in range(6):
        engine.tick()
        mx.synchronize()
        cache: Any = engine._batch._cache
        keys = cache._columns[0][0] if isinstance(cache, HostKVCache) else np.array(cache.leaves[0].keys, copy=False)
        buffers.add(keys.__array_interface__["data"][0])
    assert len(buffers) == 1
