"""The probe of how a model decodes several rows in one step."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from clotho.inference.batching_probe import probe_batching
from clotho.inference.cache_layout import CacheLayout
from clotho.models.attention import NAME, attention, install_cache_attention, original
from tests.small_models import tiny


class Installing(nn.Module):
    """A model during whose forward passes another thread installs the attention of caches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = model
        self.layers = model.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        install_cache_attention()
        logits: mx.array = self.inner(tokens, cache=cache)
        return logits


def test_a_probe_does_not_undo_what_another_thread_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the modules of mlx-lm: rows that share a prompt would be decoded with the wrong attention."""
    model = tiny("qwen3")
    module = sys.modules[type(model).__module__]
    layout = CacheLayout(Installing(model))
    monkeypatch.setattr(module, NAME, original)
    probe_batching(layout)
    assert vars(module)[NAME] is attention
