"""Models in GGUF files, the format of llama.cpp: weights and configuration of the Llama architecture.

`mlx.core.load` reads the file. Weights in Q4_0, Q4_1 and Q8_0 stay quantized, with groups of 32; mlx converts other
quantizations to float16. llama.cpp rotates pairs of neighbouring dimensions, mlx-lm's Llama rotates the two halves of a
head; the rows of the query and key projections are reordered for the latter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama

from clotho.models.gguf_header import check_header
from protocols.errors import ModelError

SUFFIX = ".gguf"
ARCHITECTURE = "llama"
GROUP_SIZE = 32
"""Number of weights that share a scale in Q4_0, Q4_1 and Q8_0."""

TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias|scales|biases)")
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotation frequencies, which Llama 3.1 and later models have."""

LLAMA3_FACTORS = (8.0, 16.0, 32.0)
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rotation of Llama 3.1 to 3.3, without its factor."""


class GgufFile:
    """An opened GGUF file: metadata and tensors by the names of llama.cpp. Raises ModelError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors, self.metadata = _read(path)
        architecture = self.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelError(f"{path}: the architecture {architecture!r} is not supported in GGUF files, only 'llama'")

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number `llama.KEY`. Raises ModelError if it is missing and has no default, or is not a number."""
        value = self.metadata.get(f"{ARCHITECTURE}.{key}", default)
        if isinstance(value, mx.array) and value.size == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {ARCHITECTURE}.{key} must be a number, not {str(value)[:60]}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the positive integer `llama.KEY`. Raises ModelError for other values."""
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.path}: {ARCHITECTURE}.{key} must be a positive integer, not {value:g}")
        return int(value)


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return str(path).endswith(SUFFIX)


def open_gguf(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a GGUF file; return it with a configuration in the form of config.json.

    Raises ModelError for another architecture, a mixture of experts, and names, shapes or rotations that mlx-lm's Llama
    does not have.
    """
    file = GgufFile(path)
    weights = _renamed(file)
    config = _configuration(file, weights)
    architecture: Any = llama  # unannotated
    try:
        model = architecture.Model(architecture.ModelArgs.from_dict(config))
        if packing := config.get("quantization"):
            nn.quantize(model, class_predicate=lambda name, _: packing.get(name, False))
        model.load_weights(list(weights.items()), strict=True)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{path}: the tensors do not form a Llama model: {' '.join(str(error).split())[:300]}"
        ) from error
    model.eval()
    return model, config


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    check_header(path)
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    tensors, metadata = loaded
    return tensors, metadata


def _renamed(file: GgufFile) -> dict[str, mx.array]:
    """Return the tensors by the names of mlx-lm, queries and keys reordered. Raises ModelError for unknown names."""
    heads = {"attn_q": file.integer("attention.head_count")}
    heads["attn_k"] = file.integer("attention.head_count_kv", heads["attn_q"])
    found: dict[str, mx.array] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        head, _, kind = name.rpartition(".")
        if head in TOP_LEVEL:
            found[f"{TOP_LEVEL[head]}.{kind}"] = tensor
        elif (match := BLOCK_TENSOR.fullmatch(name)) and match[2] in IN_BLOCK:
            part = match[2]
            value = _half_rotation(tensor, heads[part], name, file.path) if part in heads else tensor
            found[f"model.layers.{match[1]}.{IN_BLOCK[part]}.{match[3]}"] = value
        else:
            raise ModelError(f"{file.path}: the tensor {name[:80]!r} is not supported")
    return found


def _half_rotation(tensor: mx.array, heads: int, name: str, path: Path) -> mx.array:
    """Reorder the rows of each head from neighbouring pairs (0, 1), (2, 3) to halves (0, d/2), (1, d/2 + 1)."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"{path}: {name} has {rows} rows, which are not {heads} heads of even size")
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _configuration(file: GgufFile, weights: Mapping[str, mx.array]) -> dict[str, Any]:
    if "llama.expert_count" in file.metadata and file.number("expert_count") > 0:
        raise ModelError(f"{file.path}: a mixture of experts is not supported in GGUF files")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    embedding = weights.get("model.embed_tokens.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    heads, hidden = file.integer("attention.head_count"), file.integer("embedding_length")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURE,
        "hidden_size": hidden,
        "num_hidden_layers": file.integer("block_count"),
        "intermediate_size": file.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer("attention.head_count_kv", heads),
        "head_dim": file.integer("attention.key_length", hidden // heads),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": file.integer("context_length"),
        "rope_theta": file.number("rope.freq_base", 10_000.0),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in weights,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise ModelError(f"{file.path}: {len(tokens)} tokens, but an embedding of {embedding.shape[0]} rows")
    rotated = file.integer("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise ModelError(f"{file.path}: a rotation of {rotated} of {config['head_dim']} dimensions is not supported")
    if (scaling := _rope_scaling(file, config["rope_theta"], rotated)) is not None:
        config["rope_scaling"] = scaling
    if packing := _packing(weights):
        config["quantization"] = packing
    return config


def _packing(weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """Return the quantization of each module, in the form of config.json; empty if no weight is quantized."""
    found: dict[str, Any] = {}
    for name, scales in weights.items():
        module, _, kind = name.rpartition(".")
        if kind == "scales":
            bits = weights[f"{module}.weight"].shape[-1] // scales.shape[-1]
            found[module] = {"group_size": GROUP_SIZE, "bits": bits}
    if not found:
        return {}
    common = min(packing["bits"] for packing in found.values())
    return {"group_size": GROUP_SIZE, "bits": common, **found}


def _rope_scaling(file: GgufFile, base: float, dimensions: int) -> dict[str, Any] | None:
    """Return the scaling of the rotation, in the form of config.json. Raises ModelError if mlx-lm does not have it."""
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return {"type": "linear", "factor": file.number("rope.scaling.factor")}
    if kind != "none":
        raise ModelError(f"{file.path}: rope scaling {str(kind)[:40]!r} is not supported in GGUF files")
    if ROPE_FACTORS not in file.tensors:
        return None
    given = np.array(file.tensors[ROPE_FACTORS].astype(mx.float32))
    for factor in LLAMA3_FACTORS:
        if given.shape == (dimensions // 2,) and np.allclose(
            given, _llama3_divisors(base, dimensions, factor), rtol=1e-3
        ):
            return {**LLAMA3, "factor": factor}
    raise ModelError(f"{file.path}: {ROPE_FACTORS} does not match the rotation of Llama 3.1 to 3.3")


def _llama3_divisors(base: float, dimensions: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the divisors of Llama 3.1's frequencies.

    A divisor is 1 for short wavelengths and `factor` for long ones, and changes smoothly between them.
    """
    wavelength = 2 * np.pi * base ** (np.arange(0, dimensions, 2) / dimensions)
    original, low, high = 8192.0, 1.0, 4.0
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
