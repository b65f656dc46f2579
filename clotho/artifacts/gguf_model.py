"""Merges an adapter into a GGUF file: the tensors with an adapter change, everything else is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.artifacts.adapters import Adapter
from clotho.artifacts.base import Base
from clotho.artifacts.gguf_names import GgufArchitecture, architecture_of, gguf_names, heads_key
from clotho.artifacts.merging import MergeSettings, with_adapter
from clotho.models.gguf import half_rotation, pair_rotation
from protocols.errors import ArtifactError

Kind = gguf.GGMLQuantizationType
FLOATS = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}
WRITABLE = frozenset({Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0})
"""Types that the package `gguf` can write."""


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
    data = gguf.quants.quantize(np.ascontiguousarray(theirs), kind)
    kept = gguf.quants.dequantize(data, kind).reshape(before.shape) - before
    wanted = theirs - before
    parts = (float(np.square(part, dtype=np.float64).sum()) for part in (wanted, kept, kept - wanted))
    return data, [*parts, float(wanted.size)]
