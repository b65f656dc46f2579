"""Models in GGUF files, the format of llama.cpp: weights and configuration of Llama, Qwen2 and Qwen3.

`mlx.core.load` reads the file. Weights in Q4_0, Q4_1 and Q8_0 stay quantized, with groups of 32; mlx converts other
quantizations to float16. In the Llama architecture, llama.cpp rotates pairs of neighbouring dimensions, and mlx-lm
rotates the two halves of a head; the rows of the query and key projections are reordered for the latter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama, qwen2, qwen3

from attachments.files.gguf_header import BF16, F32, Q4_0, Q4_1, Q8_0, TensorInfo, read_header
from clotho.models.model_files import one_line, require_bounded_sizes
from protocols.errors import ModelError, visible

SUFFIX = ".gguf"

ARCHITECTURES: Mapping[str, Any] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
"""Modules of mlx-lm by architecture. Their names are equal in llama.cpp and mlx-lm."""

REORDERED = "llama"
"""The architecture whose rows of queries and keys are in pairs."""

GROUP_SIZE = 32
"""Number of weights that share a scale in Q4_0, Q4_1 and Q8_0."""

QUANTIZED = {Q4_0: 4, Q4_1: 4, Q8_0: 8}
"""Bits per weight of the types that stay quantized."""

FLOATS = {F32: mx.float32, BF16: mx.bfloat16}
"""Types that are read without conversion, besides float16."""

TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias|scales|biases)")
Rows = TypeVar("Rows", mx.array, np.ndarray[Any, Any])
"""A matrix or a tensor whose first axis are the outputs of a projection."""

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
    """The header of a GGUF file. Weights are read by `tensors` only.

    Raises ModelError, also for an architecture that is not supported.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path = path
        self.metadata = header.metadata
        self.infos = header.tensors
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            shown, known = visible(repr(architecture), 40), ", ".join(ARCHITECTURES)
            raise ModelError(f"{path}: the architecture {shown} is not supported in GGUF files, only {known}")
        self.architecture = architecture

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number `ARCHITECTURE.KEY`. Raises ModelError if it is no number, or missing without a default."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.path}: {self.architecture}.{key} must be a number, not {visible(str(value), 60)}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the positive integer `ARCHITECTURE.KEY`. Raises ModelError for other values."""
        value = self.number(key, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.path}: {self.architecture}.{key} must be a positive integer, not {value:g}")
        return int(value)

    def tensors(self) -> dict[str, mx.array]:
        """Read all weights, by the names of llama.cpp. Raises ModelError."""
        try:
            loaded: Any = mx.load(str(self.path), format="gguf")
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{self.path} cannot be read: {one_line(error)}") from error
        stored = {name: info for name, info in self.infos.items() if info.kind == BF16}
        return dict(loaded) | {name: self._bfloat16(info) for name, info in stored.items()}

    def _bfloat16(self, info: TensorInfo) -> mx.array:
        """Read a tensor that mlx would convert to float16, whose range is smaller."""
        words = np.fromfile(self.path, np.dtype("<u2"), math.prod(info.shape), offset=info.start)
        return mx.array(words.reshape(info.shape)).view(mx.bfloat16)

    def shapes(self) -> dict[str, mx.array]:
        """Return arrays with the shapes and types of `tensors`, which must not be evaluated; no weight is read."""
        found: dict[str, mx.array] = {}
        for name, info in self.infos.items():
            *outer, inputs = info.shape
            if (bits := QUANTIZED.get(info.kind)) is None:
                found[name] = mx.zeros(info.shape, FLOATS.get(info.kind, mx.float16))
                continue
            module = name.removesuffix(".weight")
            found[name] = mx.zeros((*outer, inputs * bits // 32), mx.uint32)
            for kind in ("scales", "biases"):
                found[f"{module}.{kind}"] = mx.zeros((*outer, inputs // GROUP_SIZE), mx.float16)
        return found

    def rope_factors(self) -> np.ndarray[Any, Any] | None:
        """Return the divisors of the rotation frequencies, if the file has them. Raises ModelError."""
        info = self.infos.get(ROPE_FACTORS)
        if info is None:
            return None
        if info.kind != F32:
            raise ModelError(f"{self.path}: {ROPE_FACTORS} must have the type float32")
        return np.fromfile(self.path, np.dtype("<f4"), math.prod(info.shape), offset=info.start)


def open_gguf(path: Path, *, read_weights: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a GGUF file; return it with a configuration in the form of config.json.

    read_weights: without it, shapes and types are final, and the weights must not be evaluated. Raises ModelError for
    another architecture, a mixture of experts, and names, shapes or rotations that mlx-lm's model does not have.
    """
    file = GgufFile(path)
    weights = _renamed(file, file.tensors() if read_weights else file.shapes())
    config = _configuration(file, weights)
    require_bounded_sizes(config, path)
    architecture = ARCHITECTURES[file.architecture]
    try:
        model = architecture.Model(architecture.ModelArgs.from_dict(config))
        if packing := config.get("quantization"):
            nn.quantize(model, class_predicate=lambda name, _: packing.get(name, False))
        model.load_weights(list(weights.items()), strict=True)
    except Exception as error:  # sizes that do not fit each other raise many kinds of exceptions
        raise ModelError(
            f"{path}: the tensors do not form a model of the architecture {file.architecture}: {one_line(error)}"
        ) from error
    model.eval()
    return model, config


def _renamed(file: GgufFile, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors by the names of mlx-lm, queries and keys reordered. Raises ModelError for unknown names.

    llama.cpp keeps vectors in float32. Their type becomes that of the other weights, which is the type of computation.
    """
    heads: dict[str, int] = {}
    if file.architecture == REORDERED:
        heads["attn_q"] = file.integer("attention.head_count")
        heads["attn_k"] = file.integer("attention.head_count_kv", heads["attn_q"])
    found: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
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
            raise ModelError(f"{file.path}: the tensor {visible(repr(name), 80)} is not supported")
    embedding = found.get("model.embed_tokens.scales", found.get("model.embed_tokens.weight"))
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    return {name: array.astype(embedding.dtype) if array.ndim == 1 else array for name, array in found.items()}


def _half_rotation(tensor: mx.array, heads: int, name: str, path: Path) -> mx.array:
    """Reorder the rows of each head for mlx-lm. Raises ModelError if they are not heads of even size."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"{path}: {name} has {rows} rows, which are not {heads} heads of even size")
    return half_rotation(tensor, heads)


def half_rotation(rows: Rows, heads: int) -> Rows:
    """Reorder the rows of each head from neighbouring pairs (0, 1), (2, 3) to halves (0, d/2), (1, d/2 + 1)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def pair_rotation(rows: Rows, heads: int) -> Rows:
    """Reorder the rows of each head from halves to neighbouring pairs, the inverse of `half_rotation`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _configuration(file: GgufFile, weights: Mapping[str, mx.array]) -> dict[str, Any]:
    if file.number("expert_count", 0) > 0:
        raise ModelError(f"{file.path}: a mixture of experts is not supported in GGUF files")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    vocabulary = weights["model.embed_tokens.weight"].shape[0]
    heads, hidden = file.integer("attention.head_count"), file.integer("embedding_length")
    config: dict[str, Any] = {
        "model_type": file.architecture,
        "hidden_size": hidden,
        "num_hidden_layers": file.integer("block_count"),
        "intermediate_size": file.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer("attention.head_count_kv", heads),
        "head_dim": file.integer("attention.key_length", hidden // heads),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocabulary,
        "max_position_embeddings": file.integer("context_length"),
        "rope_theta": file.number("rope.freq_base", 10_000.0),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in weights,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in weights,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    if len(layers) != config["num_hidden_layers"]:
        raise ModelError(
            f"{file.path}: {file.architecture}.block_count is {config['num_hidden_layers']}, not {len(layers)}"
        )
    if isinstance(tokens, list) and len(tokens) > vocabulary:
        raise ModelError(f"{file.path}: {len(tokens)} tokens, but an embedding of {vocabulary} rows")
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
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind == "linear":
        return {"type": "linear", "factor": file.number("rope.scaling.factor")}
    if kind != "none":
        raise ModelError(f"{file.path}: rope scaling {visible(repr(kind), 40)} is not supported in GGUF files")
    given = file.rope_factors()
    if given is None:
        return None
    for factor in LLAMA3_FACTORS:
        if given.shape == (dimensions // 2,) and np.allclose(
            given, llama3_divisors(base, dimensions, factor), rtol=1e-3
        ):
            return {**LLAMA3, "factor": factor}
    raise ModelError(f"{file.path}: {ROPE_FACTORS} does not match the rotation of Llama 3.1 to 3.3")


def llama3_divisors(base: float, dimensions: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the divisors of Llama 3.1's frequencies.

    A divisor is 1 for short wavelengths and `factor` for long ones, and changes smoothly between them.
    """
    wavelength = 2 * np.pi * base ** (np.arange(0, dimensions, 2) / dimensions)
    original, low, high = 8192.0, 1.0, 4.0
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
