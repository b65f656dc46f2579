"""Small random-weight models of mlx-lm's architectures, a byte tokenizer, and what the engine samples from."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from clotho.models.lora import AdaptedModule
from clotho.models.tokenizer import ChatTokenizer
from tests import model_lanes

ATTENTION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": {
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "expand": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": False,
        "layer_norm_epsilon": 1e-5,
        "chunk_size": 16,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_d_head": 8,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}


DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
"""One layer of the gated delta rule for each layer of attention."""

NEWER: dict[str, dict[str, Any]] = {
    "qwen3_5": DELTA,
    "qwen3_5_moe": {**DELTA, **ARCHITECTURES["qwen3_moe"], "shared_expert_intermediate_size": 16},
    "qwen3_next": {**DELTA, **ARCHITECTURES["qwen3_moe"], "shared_expert_intermediate_size": 16},
    "kimi_linear": {
        "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "kda_layers": [1]},
        "num_key_value_heads": 4,
        "model_max_length": 512,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "global_head_dim": 8,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
}
"""Architectures that only the tests of whole runs and of their own layers use."""


LANE_SIZES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 64.0},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "lfm2": {"block_dim": 64, "block_ff_dim": 128},
}
"""Sizes of `ARCHITECTURES` that depend on the hidden size or the head size, or that 4-bit groups of 64 divide."""


SCANNED = frozenset({"mamba2", "falcon_h1", "qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear"})
"""Architectures whose layers update a state at every token."""

WIDE: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 320, "head_dim": 32}
WIDER: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "gemma4_text": {"global_head_dim": 32},
    "lfm2": {"block_dim": 128, "block_ff_dim": 320, "full_attn_idxs": [1, 3]},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "expand": 2},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_d_state": 16, "mamba_d_head": 32, "mamba_n_heads": 8},
    "qwen3_5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "qwen3_5_moe": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "qwen3_next": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "kimi_linear": {
        "linear_attn_config": {**NEWER["kimi_linear"]["linear_attn_config"], "head_dim": 32, "kda_layers": [1, 3]},
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}
"""Sizes of models whose arrays outweigh those of the smallest buffers."""


def tiny(architecture: str, *, vocab_size: int = 64, seed: int = 0, **overrides: Any) -> nn.Module:
    """Build one of `ARCHITECTURES` or `NEWER` with evaluated random weights, wide enough that its choices differ.

    The sizes and the precision are those of the lane (tests/model_lanes.py).
    """
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    settings = {
        **ATTENTION,
        **model_lanes.sizes(),
        **{**ARCHITECTURES, **NEWER}[architecture],
        "vocab_size": vocab_size,
    }
    settings |= (LANE_SIZES.get(architecture, {}) if model_lanes.current().on_device else {}) | overrides
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict({"model_type": architecture, **settings}))
    leaves: Any = tree_flatten(model.parameters())
    model.update(tree_unflatten([(name, _spread(name, array)) for name, array in leaves]))
    mx.eval(model.parameters())
    model.eval()
    return model_lanes.converted(model)


def configuration(architecture: str, vocab_size: int) -> dict[str, Any]:
    """Return the `config.json` of a tiny model."""
    own = (ARCHITECTURES | NEWER)[architecture]
    settings = {**ATTENTION, **model_lanes.sizes(), **own, "vocab_size": vocab_size, "model_type": architecture}
    return settings | (LANE_SIZES.get(architecture, {}) if model_lanes.current().on_device else {})


def _spread(name: str, array: mx.array) -> mx.array:
    """Matrices at twice their usual scale: logits of a fresh model are too flat to tell good from bad."""
    return array * 2.0 if array.ndim == 2 and "weight" in name else array


def byte_tokenizer(*, chat_template: str | None = None) -> ChatTokenizer:
    """Tokenize every byte as itself: ids 0 to 255 are bytes, 256 is `<|end|>`, which ends a completion."""
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    wrap: Any = PreTrainedTokenizerFast
    fast = wrap(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=chat_template)
    return ChatTokenizer(fast)


def _byte_characters() -> dict[int, str]:
    """Map bytes to the characters of byte-level BPE: printable ones stand for themselves, the rest follow 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


@dataclass
class FixedSource:
    """What the engine samples from, with a version that a test may set."""

    model: nn.Module
    tokenizer: ChatTokenizer
    vocab_size: int
    context_length: int = 512
    version: int = 0
    adapted: tuple[AdaptedModule, ...] = ()
    keeps_base: bool = True


def tiny_source(architecture: str = "qwen3", *, vocab_size: int = 257, seed: int = 0, **overrides: Any) -> FixedSource:
    """Build a tiny model with the byte tokenizer; token 256 ends a completion."""
    model = tiny(architecture, vocab_size=vocab_size, seed=seed, **overrides)
    return FixedSource(model=model, tokenizer=byte_tokenizer(), vocab_size=vocab_size)
