"""Which models are decoded in NumPy: those made of supported layers whose logits agree with MLX's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import structlog
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from attachments.cpu.decoder import HostDecoder
from attachments.cpu.kv_cache import HostKVCache
from attachments.cpu.layers import CachedRoPE, ClosedFormLoRALinear, ClosedFormRMSNorm
from clotho.inference.rows import PrefilledPrompt, undivided

log = structlog.get_logger(__name__)

SUPPORTED_MODELS: dict[type, type] = {
    llama.Model: llama.TransformerBlock,
    qwen2.Model: qwen2.TransformerBlock,
    qwen3.Model: qwen3.TransformerBlock,
}
"""Architectures, and the class that all of their blocks must have."""

TEST_TOKENS = (1, 2, 3, 1)
MAX_RELATIVE_DIFFERENCE = 1e-3
"""Largest difference of logits that counts as rounding: the ratio of its standard deviation to theirs."""


def make_host_decoder(model: nn.Module) -> HostDecoder | None:
    """Return a decoder in NumPy for the model; None for an unsupported model, or if the logits differ."""
    if not is_supported(model):
        return None
    decoder = HostDecoder(model)
    difference = _relative_difference(model, decoder)
    if difference <= MAX_RELATIVE_DIFFERENCE:
        return decoder
    log.warning("numpy_decoding_unavailable", reason="logits differ from those of MLX", difference=difference)
    return None


def is_supported(model: Any) -> bool:
    """Whether the model consists of supported layers in float32, and every layer attends to all tokens."""
    block_type = SUPPORTED_MODELS.get(type(model))
    if block_type is None or any(type(cache) is not KVCache for cache in make_prompt_cache(model)):
        return False
    inner = model.model
    heads = [model.lm_head] if "lm_head" in model else []
    return (
        type(inner.embed_tokens) is nn.Embedding
        and _is_float32(inner.embed_tokens)
        and _is_norm(inner.norm)
        and all(map(_is_linear, heads))
        and all(type(block) is block_type and _is_supported_block(block) for block in inner.layers)
    )


def _is_supported_block(block: Any) -> bool:
    attention, mlp = block.self_attn, block.mlp
    linear = [attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linear += [mlp[name] for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [block.input_layernorm, block.post_attention_layernorm]
    norms += [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    rope = attention.rope
    if not all(map(_is_linear, linear)) or not all(map(_is_norm, norms)):
        return False
    keys = linear[1].linear if isinstance(linear[1], LoRALinear) else linear[1]
    rotates_whole_heads = keys.weight.shape[0] == attention.n_kv_heads * rope.dims
    return type(rope) in (nn.RoPE, CachedRoPE) and not rope.traditional and rotates_whole_heads


def _is_linear(layer: nn.Module) -> bool:
    if type(layer) in (LoRALinear, ClosedFormLoRALinear):
        return type(layer.linear) is nn.Linear and _is_float32(layer.linear) and _is_float32(layer)
    return type(layer) is nn.Linear and _is_float32(layer)


def _is_norm(layer: nn.Module) -> bool:
    return type(layer) in (nn.RMSNorm, ClosedFormRMSNorm) and _is_float32(layer)


def _is_float32(layer: nn.Module) -> bool:
    return all(value.dtype == mx.float32 for value in layer.values() if isinstance(value, mx.array))


def _relative_difference(model: nn.Module, decoder: HostDecoder) -> float:
    """Return how much the logits after `TEST_TOKENS` differ from the model's, relative to their standard deviation."""
    *before, last = TEST_TOKENS
    cache = make_prompt_cache(model)
    model(mx.array([before]), cache=cache)
    state = tuple((c.keys[:1, :, : len(before)], c.values[:1, :, : len(before)]) for c in cache)
    expected_V = np.array(model(mx.array([[last]]), cache=cache)[0, -1])
    mx.eval(state)
    host_cache = HostKVCache(decoder, 1)
    prompt = PrefilledPrompt(rows=1, tokens=len(before), state=state, reserved=len(before) + 1)
    position_B, live_B = np.array([len(before)], np.int32), np.array([True])
    host_cache.make_room(position_B, ~live_B, [prompt])
    host_cache.enter([0], prompt)
    found_V = undivided(host_cache.parts(np.array([last], np.int32), position_B, live_B, divided=False))[0]
    finite_V = np.isfinite(expected_V)
    if not finite_V.any() or (np.isfinite(found_V) != finite_V).any():
        return np.inf
    expected_V, found_V = expected_V[finite_V], found_V[finite_V]
    return float(np.std(found_V - expected_V)) / max(float(np.std(expected_V)), 1e-30)
