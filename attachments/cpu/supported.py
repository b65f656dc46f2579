"""Which models are decoded in NumPy: those made of supported layers whose logits agree with MLX's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import structlog
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from attachments.cpu.decoder import HostDecoder
from attachments.cpu.kv_cache import HostKVCache
from attachments.cpu.layers import CachedRoPE, ClosedFormLoRALinear, ClosedFormRMSNorm
from clotho.inference.cache_layout import CacheLayout
from clotho.inference.rows import PrefilledPrompt, undivided

log = structlog.get_logger(__name__)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
"""Modules of mlx-lm whose models are decoded."""

PARTS = frozenset(f"mlx_lm.models.{name}" for name in (*ARCHITECTURES, "qwen3_next", "switch_layers"))
"""Modules of mlx-lm whose layers are known, as far as these models have them."""

LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Dropout, nn.RMSNorm, nn.RoPE),
    *(ClosedFormRMSNorm, CachedRoPE, LoRALinear, ClosedFormLoRALinear, LoRASwitchLinear),
)
"""Other layers that are known."""

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
    """Whether the model consists of known layers in float32, and its layers of attention attend to all tokens."""
    if type(model).__module__ not in {f"mlx_lm.models.{name}" for name in ARCHITECTURES}:
        return False
    caches = {type(cache) for cache in make_prompt_cache(model)}
    return KVCache in caches <= {KVCache, ArraysCache} and all(map(_is_known, model.modules()))


def _is_known(layer: Any) -> bool:
    if type(layer) not in LAYERS and type(layer).__module__ not in PARTS:
        return False
    arrays = [value for value in layer.values() if isinstance(value, mx.array)]
    return all(array.dtype == mx.float32 for array in arrays) and not getattr(layer, "traditional", False)


def _relative_difference(model: nn.Module, decoder: HostDecoder) -> float:
    """Return how much the logits after `TEST_TOKENS` differ from the model's, relative to their standard deviation."""
    *before, last = TEST_TOKENS
    state = CacheLayout(model).prefilled(before)
    expected_V = np.array(model(mx.array([TEST_TOKENS]))[0, -1])
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
