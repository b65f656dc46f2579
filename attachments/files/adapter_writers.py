"""Writes adapters in every format, and refuses by name what a format cannot express."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from attachments.files.gguf import pair_rotation
from attachments.files.gguf_names import architecture_of, gguf_names, heads_key
from attachments.files.merging import expert_layer
from clotho.storage.adapters import CONFIG, encode_config, padded
from clotho.storage.atomic_files import write_file
from clotho.storage.tensors import StoredTensor, write_stored
from protocols.checkpoint import AdapterConfig, LoRAParameters
from protocols.errors import ArtifactError, visible
from training_run.adapters.contents import Adapter, Floats
from training_run.adapters.formats import (
    EMBEDDING,
    LABELS,
    MLX,
    NPZ,
    PEFT,
    FormatName,
    PeftConfig,
    place_of,
    quotient,
)
from training_run.adapters.reading import listed

HUGGING_FACE = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
STORED = {"F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "BF16": ("bfloat16", "<u2")}


def write_mlx(directory: Path, adapter: Adapter) -> None:
    """Write the files of mlx-lm to a new directory."""
    arrays, config = _in_mlx_layout(adapter, "mlx")
    stored = {name: _stored(array, adapter.dtypes[name]) for name, array in arrays.items()}
    write_stored(directory / MLX.tensors, stored)
    write_file(directory / CONFIG, [encode_config(config)])


def write_npz(directory: Path, adapter: Adapter) -> None:
    """Write `adapter.npz` and the configuration of mlx-lm to a new directory. NumPy has no bfloat16."""
    _refuse("npz", "bfloat16 tensors", (name for name, dtype in adapter.dtypes.items() if dtype == "BF16"))
    arrays, config = _in_mlx_layout(adapter, "npz")
    content = io.BytesIO()
    typed: dict[str, Any] = {name: array.astype(STORED[adapter.dtypes[name]][1]) for name, array in arrays.items()}
    np.savez(content, **typed)
    write_file(directory / NPZ.tensors, [content.getvalue()])
    write_file(directory / CONFIG, [encode_config(config)])


def write_peft(directory: Path, adapter: Adapter) -> None:
    """Write the files of PEFT to a new directory. Experts become separate layers."""
    if adapter.base is None or "lm_head" not in adapter.base.targets or adapter.has_magnitudes:
        _refuse_embeddings("peft", adapter)
    _refuse_unknown_names("peft", adapter)
    _refuse_weights("peft", adapter)
    tensors: dict[str, StoredTensor] = {}
    for name, array in adapter.arrays.items():
        module, _, matrix = name.rpartition(".")
        dtype, theirs = adapter.dtypes[name], HUGGING_FACE[matrix]
        if adapter.targets[module].embedding:
            tensors[f"base_model.model.{module}.{EMBEDDING}{matrix[-1].upper()}"] = _stored(array.T, dtype)
        elif adapter.targets[module].experts:
            for expert, own in enumerate(array):
                layer = expert_layer(module, f".{expert}")
                tensors[f"base_model.model.{layer}.{theirs}"] = _stored(own, dtype)
        else:
            tensors[f"base_model.model.{module}.{theirs}"] = _stored(array.T, dtype)
    write_stored(directory / PEFT.tensors, tensors, {"format": "pt"})
    write_file(directory / CONFIG, [encode_config(peft_config(adapter))])


def peft_config(adapter: Adapter) -> dict[str, object]:
    """Return the configuration for PEFT.

    r and lora_alpha are those of the module with the largest rank. Layers are named by their last parts if every block
    up to the last adapted one has the same layers, and in full otherwise.
    """
    largest = max(adapter.ranks, key=lambda module: (adapter.ranks[module], module))
    rank, alpha = adapter.ranks[largest], alpha_of(adapter.scales[largest], adapter.ranks[largest])
    alphas = {module: alpha_of(adapter.scales[module], adapter.ranks[module]) for module in adapter.ranks}
    return {
        "alpha_pattern": _pattern({module: _number(own) for module, own in alphas.items()}, _number(alpha)),
        PeftConfig.base_key: adapter.base_name or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "layers_to_transform": None,
        "lora_alpha": _number(alpha),
        "lora_dropout": adapter.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": _pattern(adapter.ranks, rank),
        "target_modules": _target_modules(adapter.ranks),
        "task_type": "CAUSAL_LM",
        PeftConfig.method_key: adapter.has_magnitudes,
        "use_rslora": False,
    }


def write_gguf(path: Path, adapter: Adapter) -> None:
    """Write a GGUF file for llama.cpp.

    llama.cpp computes the scale as alpha / rank. If this differs between layers of one scale, matrices of smaller ranks
    are padded with zeros, which does not change A B.
    """
    _refuse_weights("gguf", adapter)
    _refuse("gguf", f"magnitudes of {LABELS[adapter.method]}", adapter.ranks if adapter.has_magnitudes else ())
    _refuse_embeddings("gguf", adapter)
    base = adapter.base
    if base is None:
        shown = f"{visible(adapter.base_name, 100)!r} is not on this machine" if adapter.base_name else "it is unknown"
        raise ArtifactError(
            f"gguf: the names of layers depend on the base model, and {shown}: name it with --model MODEL",
            reason="base",
        )
    architecture = architecture_of(base.architecture)
    names = gguf_names(adapter.ranks, architecture, base.layers)
    _refuse("gguf", "layers that llama.cpp does not have", (module for module in adapter.ranks if module not in names))
    if base.config.get("tie_word_embeddings") is not False:
        _refuse("gguf", "a head that is tied to the embeddings", (name for name in adapter.ranks if name == "lm_head"))
    arrays, alpha = _one_alpha(adapter)
    writer = gguf.GGUFWriter(path, architecture.name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    if adapter.base_name:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, adapter.base_name)
    for name, array in arrays.items():
        module, _, matrix = name.rpartition(".")
        values = array if adapter.targets[module].experts else array.T
        heads = heads_key(module, architecture) if matrix == "lora_b" else None
        rows = pair_rotation(values, base.number(heads)) if heads else values
        dtype = adapter.dtypes[name]
        data = _stored(rows, dtype).data.reshape(*rows.shape[:-1], -1)
        writer.add_tensor(f"{names[module]}.{matrix}", data, raw_dtype=gguf.GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WRITERS: Mapping[FormatName, Callable[[Path, Adapter], None]] = {
    "mlx": write_mlx, "peft": write_peft, "npz": write_npz, "gguf": write_gguf,
}  # fmt: skip
"""Writes an adapter to a new directory, or with GGUF to a new file. Raises ArtifactError and OSError."""


def _in_mlx_layout(adapter: Adapter, form: FormatName) -> tuple[dict[str, Floats], AdapterConfig]:
    """Return the matrices with one rank, and the configuration. Raises ArtifactError."""
    _refuse_weights(form, adapter)
    scales = set(adapter.scales.values())
    if len(scales) > 1:
        shown = listed([f"{scale:g}" for scale in sorted(scales)])
        raise ArtifactError(
            f"{form}: all layers share one scale, and this adapter has the scales {shown}", reason="inexpressible"
        )
    names = {place_of(module)[1] for module in adapter.ranks}
    largest = max(adapter.ranks.values())
    config = AdapterConfig(
        fine_tune_type=adapter.method,
        num_layers=_last_blocks(adapter),
        lora_parameters=LoRAParameters(
            rank=largest, scale=scales.pop(), dropout=adapter.dropout, keys=tuple(sorted(names))
        ),
        ranks={key: int(rank) for key, rank in sorted(_pattern(adapter.ranks, largest).items())},
        model=adapter.base_name,
        base_quantization=adapter.base_quantization,
    )
    return {name: padded(name, array, largest) for name, array in adapter.arrays.items()}, config


def _one_alpha(adapter: Adapter) -> tuple[dict[str, Floats], float]:
    """Return the matrices and the alpha with which alpha / rank is the scale of every layer. Raises ArtifactError."""
    alphas = {alpha_of(adapter.scales[module], rank) for module, rank in adapter.ranks.items()}
    if len(alphas) == 1:
        return dict(adapter.arrays), alphas.pop()
    if len(scales := set(adapter.scales.values())) == 1:
        largest = max(adapter.ranks.values())
        arrays = {name: padded(name, array, largest) for name, array in adapter.arrays.items()}
        return arrays, alpha_of(scales.pop(), largest)
    raise ArtifactError("gguf: all layers share one alpha, and this adapter has several scales", reason="inexpressible")


def _last_blocks(adapter: Adapter) -> int:
    """Return how many of the last blocks have an adapter; -1 for all, and if the number of blocks is unknown.

    mlx-lm installs adapters that change nothing where the file has no matrices, so that -1 is always correct.
    """
    blocks = {place_of(module)[0] for module in adapter.ranks} - {None}
    total = adapter.base.layers if adapter.base and blocks else 0
    is_end = blocks == set(range(total - len(blocks), total))
    return len(blocks) if is_end and 0 < len(blocks) < total else -1


def _target_modules(modules: Iterable[str]) -> list[str]:
    in_blocks: dict[int, set[str]] = {}
    outside: set[str] = set()
    for module in modules:
        block, name = place_of(expert_layer(module, ""))
        if block is None:
            outside.add(name)
        else:
            in_blocks.setdefault(block, set()).add(name.replace(".experts.", "."))
    alike = len(set(map(frozenset, in_blocks.values()))) == 1 and in_blocks.keys() == set(range(len(in_blocks)))
    if alike:
        return sorted({name for names in in_blocks.values() for name in names} | outside)
    return sorted(modules)


def _pattern(values: Mapping[str, int | float], usual: float) -> dict[str, int | float]:
    """Return the values that differ from the usual one, by the last parts of names where all blocks agree."""
    by_name: dict[str, set[int | float]] = {}
    for module, value in values.items():
        by_name.setdefault(place_of(module)[1], set()).add(value)
    return {
        name if len(by_name[name := place_of(module)[1]]) == 1 else module: value
        for module, value in sorted(values.items())
        if value != usual
    }


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def _refuse_embeddings(form: FormatName, adapter: Adapter) -> None:
    """Refuse embeddings: if the head shares their weights, mlx-lm adapts it too, and other libraries do not."""
    _refuse(form, "adapters of embeddings", (module for module, target in adapter.targets.items() if target.embedding))


def _refuse_weights(form: FormatName, adapter: Adapter) -> None:
    _refuse(form, "weights that replace those of the base model", adapter.weights)


def _refuse_unknown_names(form: FormatName, adapter: Adapter) -> None:
    known = ("lm_head", "model.embed_tokens")
    unknown = (name for name in adapter.ranks if not name.startswith("model.layers.") and name not in known)
    _refuse(form, "layers whose Hugging Face names are unknown", unknown)


def _refuse(form: FormatName, what: str, names: Iterable[str]) -> None:
    """Raise ArtifactError if there are any names."""
    found = sorted(names)
    if found:
        raise ArtifactError(f"{form} cannot express {what}: {listed(found)}", reason="inexpressible")


def _stored(values: Floats, dtype: str) -> StoredTensor:
    """Return the values in a type of the file, which has the same values."""
    name, kind = STORED[dtype]
    ordered = np.ascontiguousarray(values, np.float32)
    typed = (ordered.view(np.uint32) >> 16).astype(kind) if dtype == "BF16" else ordered.astype(kind)
    return StoredTensor(name, ordered.shape, typed.reshape(-1).view(np.uint8))


def alpha_of(scale: float, rank: int) -> float:
    """Return the alpha whose quotient by the rank is `scale`, preferably a short decimal number."""
    return quotient(scale * rank, 1.0)
