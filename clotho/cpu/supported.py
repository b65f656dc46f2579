"""Which models are decoded on the host: those that are made of known parts, and whose logits come out the same."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import structlog
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.tuner.lora import LoRALinear

from clotho.cpu.attention import Rotation
from clotho.cpu.decoder import HostDecoder
from clotho.cpu.kv_cache import HostCache
from clotho.cpu.layers import LowRankLinear, Norm, on_cpu
from clotho.inference.cache_layout import Arrival, AttentionLeaf, CacheLayout

log = structlog.get_logger(__name__)

MODELS: dict[type, type] = {
    llama.Model: llama.TransformerBlock,
    qwen2.Model: qwen2.TransformerBlock,
    qwen3.Model: qwen3.TransformerBlock,
}
"""Architectures, and the blocks that they must be made of."""

PROBE = (1, 2, 3, 1)
ROUNDING = 1e-3
"""Difference of logits that is still rounding: its standard deviation to theirs."""


def host_decoder(layout: CacheLayout) -> HostDecoder | None:
    """A decoder on the host for the model of `layout`, or None where that is not for it, or not for this machine."""
    if not on_cpu() or not fits(layout):
        return None
    decoder = HostDecoder(layout.model)
    difference = _difference(layout, decoder)
    if difference <= ROUNDING:
        return decoder
    log.warning("the model decodes through MLX: on the host its logits would differ", by=f"{difference:.1%}")
    return None


def fits(layout: CacheLayout) -> bool:
    """Say whether the model consists of parts that the host knows, in float32, and every layer sees all tokens."""
    model: Any = layout.model
    block_type = MODELS.get(type(model))
    if block_type is None or any(not isinstance(leaf, AttentionLeaf) or leaf.window for leaf in layout.leaves):
        return False
    inner = model.model
    heads = [model.lm_head] if "lm_head" in model else []
    return (
        type(inner.embed_tokens) is nn.Embedding
        and _is_float32(inner.embed_tokens)
        and _is_norm(inner.norm)
        and all(map(_is_linear, heads))
        and all(type(block) is block_type and _knows(block) for block in inner.layers)
    )


def _knows(block: Any) -> bool:
    attention, mlp = block.self_attn, block.mlp
    linear = [attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linear += [mlp[name] for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [block.input_layernorm, block.post_attention_layernorm]
    norms += [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    rope = attention.rope
    if not all(map(_is_linear, linear)) or not all(map(_is_norm, norms)):
        return False
    keys = linear[1].linear if isinstance(linear[1], LoRALinear) else linear[1]
    turned_whole = keys.weight.shape[0] == attention.n_kv_heads * rope.dims
    return type(rope) in (nn.RoPE, Rotation) and not rope.traditional and turned_whole


def _is_linear(layer: nn.Module) -> bool:
    if type(layer) in (LoRALinear, LowRankLinear):
        return type(layer.linear) is nn.Linear and _is_float32(layer.linear) and _is_float32(layer)
    return type(layer) is nn.Linear and _is_float32(layer)


def _is_norm(layer: nn.Module) -> bool:
    return type(layer) in (nn.RMSNorm, Norm) and _is_float32(layer)


def _is_float32(layer: nn.Module) -> bool:
    return all(value.dtype == mx.float32 for value in layer.values() if isinstance(value, mx.array))


def _difference(layout: CacheLayout, decoder: HostDecoder) -> float:
    """How far the logits after `PROBE` are from the model's, relative to these."""
    *before, last = PROBE
    cache = layout.fresh()
    layout.model(mx.array([before]), cache=cache)
    state = layout.extract(cache, 0, len(before))
    expected_V = np.array(layout.model(mx.array([[last]]), cache=cache)[0, -1])
    mx.eval(state)
    rows = HostCache(decoder, 1)
    arrival = Arrival(rows=1, tokens=len(before), state=state)
    position_B, live_B = np.array([len(before)], np.int32), np.array([True])
    rows.make_room(position_B, ~live_B, [arrival])
    rows.enter([0], arrival)
    found_V = rows.logits(np.array([last], np.int32), position_B, live_B)[0]
    finite_V = np.isfinite(expected_V)
    if not finite_V.any() or (np.isfinite(found_V) != finite_V).any():
        return np.inf
    expected_V, found_V = expected_V[finite_V], found_V[finite_V]
    return float(np.std(found_V - expected_V)) / max(float(np.std(expected_V)), 1e-30)
