"""Attention layers of Qwen3 with one kernel for the norms and rotations of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3, qwen3_moe

from attachments.metal.norm_rotation import norm_rotation, settings_of
from clotho.inference.kv_cache import LayerKVCache
from clotho.models.attention import attention


class _Fused:
    """Computes decode steps of a `LayerKVCache` itself; sequences and other caches are left to mlx-lm."""

    settings: mx.array

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """Compute attention. Arguments are mlx-lm's."""
        layer: Any = self
        if x.shape[1] > 1 or not isinstance(cache, LayerKVCache) or x.dtype != layer.q_norm.weight.dtype:
            y: mx.array = super().__call__(x, mask, cache)  # type: ignore[misc]  # of mlx-lm's class
            return y
        rows = x.shape[0]
        q, k, v = (project(x).reshape(rows, -1) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        queries, keys = norm_rotation(layer, self.settings, q, k, cache.offset)
        keys, values = cache.update_and_fetch(keys, v.reshape(rows, layer.n_kv_heads, 1, -1))
        y = attention(queries, keys, values, cache, layer.scale, mask)
        projected: mx.array = layer.o_proj(y.reshape(rows, 1, -1))
        return projected


class FusedAttention(_Fused, qwen3.Attention):
    """The attention of Qwen3."""


class FusedMoeAttention(_Fused, qwen3_moe.Attention):
    """The attention of Qwen3 with experts."""


CLASSES: dict[type, type] = {qwen3.Attention: FusedAttention, qwen3_moe.Attention: FusedMoeAttention}


def fusible(model: nn.Module) -> list[Any]:
    """Return the attention layers whose norms and rotation the kernel computes."""
    return [module for module in model.modules() if type(module) in CLASSES and _fits(module)]


def _fits(layer: Any) -> bool:
    rope, weights = layer.rope, (layer.q_norm.weight, layer.k_norm.weight)
    return (
        type(rope) is nn.RoPE
        and not rope.traditional
        and all(weight.shape == (rope.dims,) and weight.dtype == weights[0].dtype for weight in weights)
        and not any(norm.trainable_parameters() for norm in (layer.q_norm, layer.k_norm))
    )


def install(layers: Sequence[Any]) -> None:
    """Replace the class of attention layers; modules stay the same objects."""
    for layer in layers:
        layer.__class__ = CLASSES[type(layer)]
        object.__setattr__(layer, "settings", settings_of(layer))  # no parameter of the model
        mx.eval(layer.settings)
