"""Helpers: tiny models that are decoded on the host."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from attachments.cpu.blas import Floats
from attachments.cpu.decoder import HostDecoder
from attachments.cpu.kv_cache import HostKVCache
from clotho.models.experts import EXPERT_LINEAR
from tests.inference.cache_rows import Rows
from tests.small_models import ARCHITECTURES, FixedSource, tiny_source

PLAIN = ("qwen3", "qwen2", "llama")
"""Architectures that the host knows, with attention and linear layers."""

SUPPORTED = (*PLAIN, "qwen3_moe", "qwen3_5", "qwen3_next")
"""All architectures that the host knows: also with experts, and with the gated delta rule."""

ADAPTED = {
    "self_attn": (2, ("q_proj", "v_proj", "o_proj")),
    "linear_attn": (2, ("in_proj_qkv", "in_proj_a", "in_proj_qkvz", "out_proj")),
    "mlp": (3, ("gate", "gate_proj", "down_proj")),
    "switch_mlp": (3, ("gate_proj", "down_proj")),
}
"""Rank and names of the adapted layers of a module of this name, which can have others."""


def plain_source(architecture: str, **overrides: Any) -> FixedSource:
    """Build a tiny model of a known architecture whose norms and biases all differ, so that none can be left out."""
    with patch.dict(ARCHITECTURES, {"qwen2": {}}):
        source = tiny_source(architecture, **overrides)
    leaves: Any = tree_flatten(source.model.parameters())
    vectors = [(name, array) for name, array in leaves if array.ndim == 1]
    keys = mx.random.split(mx.random.key(3), len(vectors))
    pairs = zip(vectors, keys, strict=True)
    source.model.update(
        tree_unflatten([(name, mx.random.uniform(0.5, 1.5, a.shape, key=key)) for (name, a), key in pairs])
    )
    mx.eval(source.model.parameters())
    return source


def adapt(model: nn.Module) -> None:
    """Put trained low-rank layers into every block: of two ranks, and beside layers that have none."""
    parents = [(name.rpartition(".")[2], module) for name, module in model.named_modules()]
    for name, parent in parents:
        rank, keys = ADAPTED.get(name, (0, ()))
        for i, key in enumerate(key for key in keys if key in parent):
            kind: Any = LoRASwitchLinear if isinstance(parent[key], EXPERT_LINEAR) else LoRALinear
            layer = kind.from_base(parent[key], r=rank, scale=1.5)
            layer.lora_b = 0.3 * mx.random.normal(layer.lora_b.shape, key=mx.random.key(i))
            layer.eval()
            mx.eval(layer.parameters())
            parent[key] = layer


def host_rows(model: nn.Module, slots: int) -> Rows:
    """Return rows of a cache on the host."""
    return Rows(model, slots, HostKVCache(HostDecoder(model), slots))


def scaled_parts(factor: np.float32) -> Callable[..., Generator[None, None, Floats]]:
    """Return `HostDecoder.parts` with other logits: `factor` times as large."""
    true = HostDecoder.parts

    def parts(*given: Any) -> Generator[None, None, Floats]:
        logits_B_V = yield from true(*given)
        return logits_B_V * factor

    return parts
