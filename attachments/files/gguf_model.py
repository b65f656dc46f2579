"""Writes GGUF files with an adapter merged into the weights.

Of a base model in a GGUF file, the tensors with an adapter change and everything else is copied. Of a directory, all
weights are written by the names of llama.cpp, with the settings and the tokenizer as metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attachments.files.gguf import (
    LLAMA3,
    LLAMA3_FACTORS,
    REORDERED,
    ROPE_FACTORS,
    half_rotation,
    llama3_divisors,
    pair_rotation,
)
from attachments.files.gguf_names import KINDS, GgufArchitecture, architecture_of, gguf_names, heads_key
from attachments.files.gguf_vocabulary import add_tokenizer, require_same_tokens
from attachments.files.merging import MergeSettings, Packing, Weights, full_weight, stored_dtype, with_adapter
from clotho.models.loading import context_length
from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import ArtifactError, visible
from training_run.adapters.contents import Adapter, Base

Kind = gguf.GGMLQuantizationType
FLOATS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}
WRITABLE = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0})
"""Types that the package `gguf` can write."""

PACKINGS = {Packing(8, 32): Kind.Q8_0, Packing(4, 32): Kind.Q4_1}
"""Types of quantized weights that have a counterpart in mlx."""

FILE_TYPES = {Kind.F32: 0, Kind.F16: 1, Kind.Q4_1: 3, Kind.Q8_0: 7, Kind.BF16: 32}
"""What llama.cpp calls a file most of whose weights have a type (`llama_ftype`)."""

EMBEDDINGS = "model.embed_tokens"
FROM_DIRECTORIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose weights differ from those of llama.cpp in names and order only."""


def write_gguf_model(path: Path, base: Base, adapter: Adapter, settings: MergeSettings) -> list[list[float]]:
    """Write a GGUF file with the adapter merged into its tensors; return the changes of layers (see `MergedLayer`).

    Changed tensors keep their type. With `dequantize` they have `settings.dtype`, or float16. Raises ArtifactError if
    the file lacks a tensor, or has it in a type that cannot be written.
    """
    architecture = architecture_of(base.architecture)
    modules = {name: module for module, name in gguf_names(adapter.ranks, architecture, base.layers).items()}
    reader = gguf.GGUFReader(base.files)
    kinds = {str(tensor.name): _kind(tensor, modules, settings) for tensor in reader.tensors}
    if lacking := sorted(set(adapter.ranks) - {modules[name] for name in kinds if name in modules}):
        raise ArtifactError(f"{base.path} has no layer {lacking[0]}, which the adapter changes", reason="base")
    writer = gguf.GGUFWriter(path, architecture.name)
    for field in reader.fields.values():
        if field.name != gguf.Keys.General.ARCHITECTURE and not field.name.startswith("GGUF."):
            items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=items)
    for tensor in reader.tensors:
        kind = kinds[tensor.name]
        shape = tuple(int(side) for side in reversed(tensor.shape))
        stored = gguf.quants.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    changes = []
    for tensor in reader.tensors:
        if tensor.name in modules:
            data, change = _merged(tensor, modules[tensor.name], base, adapter, architecture, kinds[tensor.name])
            writer.write_tensor_data(data)
            changes.append(change)
        else:
            writer.write_tensor_data(tensor.data)
    writer.close()
    return changes


def _kind(tensor: Any, modules: dict[str, str], settings: MergeSettings) -> gguf.GGMLQuantizationType:
    """Return the type of a tensor in the new file."""
    kind = Kind(tensor.tensor_type)
    if tensor.name not in modules:
        return kind
    if settings.dtype != "auto" and (settings.dequantize or kind in FLOATS.values()):
        return FLOATS[settings.dtype]
    if settings.dequantize and kind not in FLOATS.values():
        return Kind.F16
    if kind not in WRITABLE:
        raise ArtifactError(
            f"gguf: {tensor.name} has the type {kind.name}, which cannot be written: add --dequantize",
            reason="inexpressible",
        )
    return kind


def _merged(
    tensor: Any,
    module: str,
    base: Base,
    adapter: Adapter,
    architecture: GgufArchitecture,
    kind: gguf.GGMLQuantizationType,
) -> tuple[NDArray[Any], list[float]]:
    """Return the bytes of a changed tensor, and its change."""
    before: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    before = before.reshape([int(side) for side in reversed(tensor.shape)])
    key = heads_key(module, architecture)
    ours = half_rotation(before, base.number(key)) if key else before
    after = np.array(with_adapter(mx.array(ours), adapter, module))
    theirs = pair_rotation(after, base.number(key)) if key else after
    return _stored(before, theirs, kind)


def _stored(
    before: NDArray[np.float32], after: NDArray[np.float32], kind: gguf.GGMLQuantizationType
) -> tuple[NDArray[Any], list[float]]:
    """Return the bytes of a weight, and its change."""
    data = gguf.quants.quantize(np.ascontiguousarray(after), kind)
    kept = gguf.quants.dequantize(data, kind).reshape(before.shape) - before
    wanted = after - before
    parts = (float(np.square(part, dtype=np.float64).sum()) for part in (wanted, kept, kept - wanted))
    return data, [*parts, float(wanted.size)]


class _Layer(NamedTuple):
    """A layer in a GGUF file. name, theirs: its names in mlx-lm and llama.cpp. heads: number of heads to reorder."""

    name: str
    theirs: str
    kind: gguf.GGMLQuantizationType
    shapes: dict[str, tuple[int, ...]]
    heads: int | None


def write_gguf_of_directory(
    path: Path, base: Base, weights: Weights, adapter: Adapter, settings: MergeSettings, tokenizer: ChatTokenizer
) -> list[list[float]]:
    """Write a GGUF file of a base model in a directory with the adapter merged into it; return the changes of layers.

    weights: of the base model, with the types of its files, not evaluated. Each layer leaves them when it is written.
    Raises ArtifactError if llama.cpp lacks a part of the model or of the tokenizer.
    """
    if base.architecture not in FROM_DIRECTORIES:
        raise _inexpressible(f"{visible(repr(base.architecture), 60)} is not one of {', '.join(FROM_DIRECTORIES)}")
    layers = list(_layers(base, weights, settings))
    embeddings = next(layer for layer in layers if layer.name == EMBEDDINGS)
    architecture = architecture_of(base.architecture)
    writer = gguf.GGUFWriter(path, architecture.name)
    _add_settings(writer, base, weights.arguments, embeddings.kind)
    factors = _rotation(writer, weights.arguments)
    add_tokenizer(writer, tokenizer, embeddings.shapes["weight"][0])
    for layer in layers:
        for key, shape in layer.shapes.items():
            kind = layer.kind if key == "weight" else Kind.F32
            stored = gguf.quants.quant_shape_to_byte_shape(shape, kind)
            size = int(np.prod(stored))
            writer.add_tensor_info(f"{layer.theirs}.{key}", stored, np.dtype(np.uint8), size, raw_dtype=kind)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    changes = [change for layer in layers if (change := _write_layer(writer, layer, weights, adapter))]
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()
    require_same_tokens(path, tokenizer)
    return changes


def _layers(base: Base, weights: Weights, settings: MergeSettings) -> Iterator[_Layer]:
    """Yield all layers in the order of the file. Raises ArtifactError if llama.cpp lacks one."""
    architecture = architecture_of(base.architecture)
    table = gguf.get_tensor_name_map(KINDS[architecture.name], base.layers)
    for name, own in weights.arrays.items():
        if (theirs := table.get_name(name)) is None:
            raise _inexpressible(f"llama.cpp has no layer {visible(name, 100)}")
        packing = weights.packings[name]
        shapes: dict[str, tuple[int, ...]] = {key: own[key].shape for key in ("weight", "bias") if key in own}
        if packing:
            *outer, groups = own["scales"].shape
            shapes["weight"] = (*outer, groups * packing.group_size)
        heads = heads_key(name, architecture)
        kind = _kind_of(name, shapes["weight"], stored_dtype(own, packing, settings), settings)
        yield _Layer(name, theirs, kind, shapes, base.number(heads) if heads else None)


def _write_layer(writer: gguf.GGUFWriter, layer: _Layer, weights: Weights, adapter: Adapter) -> list[float] | None:
    """Write the tensors of a layer; return the change of a layer with an adapter."""
    own = weights.arrays.pop(layer.name)
    weight, change = full_weight(own, weights.packings[layer.name]), None
    before = _in_file_order(weight, layer.heads)
    if adapter.changes(layer.name):
        after = _in_file_order(with_adapter(weight, adapter, layer.name), layer.heads)
        data, change = _stored(before, after, layer.kind)
    else:
        data = gguf.quants.quantize(before, layer.kind)
    writer.write_tensor_data(data)
    if "bias" in own:
        bias = adapter.weights.get(f"{layer.name}.bias", own["bias"])
        writer.write_tensor_data(_in_file_order(mx.array(bias), layer.heads))
    mx.clear_cache()
    return change


def _in_file_order(array: mx.array, heads: int | None) -> NDArray[np.float32]:
    values = np.array(array.astype(mx.float32))
    return np.ascontiguousarray(pair_rotation(values, heads)) if heads else values


def _kind_of(name: str, shape: tuple[int, ...], dtype: mx.Dtype, settings: MergeSettings) -> gguf.GGMLQuantizationType:
    """Return the type of a weight in the new file. llama.cpp computes with vectors in float32."""
    if len(shape) == 1:
        return Kind.F32
    if settings.quantize is None:
        return FLOATS[str(dtype).removeprefix("mlx.core.")]
    if shape[-1] % settings.quantize.group_size:
        raise _inexpressible(f"{name} has {shape[-1]} columns, which {settings.quantize.group_size} does not divide")
    return PACKINGS[settings.quantize]


def _add_settings(writer: gguf.GGUFWriter, base: Base, arguments: Any, kind: gguf.GGMLQuantizationType) -> None:
    """Add the sizes of a model. arguments: those of mlx-lm's model. kind: type of most weights."""
    head_size = _head_size(arguments)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(base.files.name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(base.layers)
    writer.add_context_length(context_length(dict(base.config)))
    writer.add_vocab_size(arguments.vocab_size)
    writer.add_embedding_length(arguments.hidden_size)
    writer.add_feed_forward_length(arguments.intermediate_size)
    writer.add_head_count(arguments.num_attention_heads)
    writer.add_head_count_kv(arguments.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(arguments.rms_norm_eps)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(arguments.rope_theta)


def _head_size(arguments: Any) -> int:
    return int(getattr(arguments, "head_dim", None) or arguments.hidden_size // arguments.num_attention_heads)


def _rotation(writer: gguf.GGUFWriter, arguments: Any) -> NDArray[np.float32] | None:
    """Add the scaling of the rotation; return the divisors of its frequencies, if it has any. Raises ArtifactError."""
    if getattr(arguments, "rope_traditional", False):
        raise _inexpressible("rope_traditional is set")
    if "sliding_attention" in (getattr(arguments, "layer_types", None) or ()):
        raise _inexpressible("layer_types contains sliding_attention")
    scaling: Mapping[str, Any] = arguments.rope_scaling or {}
    rotation, factor = scaling.get("type") or scaling.get("rope_type", "default"), scaling.get("factor")
    if rotation == "default":
        return None
    if rotation == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
        return None
    others = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    is_known = factor in LLAMA3_FACTORS and all(scaling.get(key, value) == value for key, value in others.items())
    if rotation != "llama3" or writer.arch != REORDERED or not is_known:
        raise _inexpressible(f"rope_scaling is {visible(str(dict(scaling)), 200)}")
    return llama3_divisors(float(arguments.rope_theta), _head_size(arguments), float(scaling["factor"])).astype("<f4")


def _inexpressible(why: str) -> ArtifactError:
    return ArtifactError(f"gguf: the base model cannot be expressed: {why}", reason="inexpressible")
