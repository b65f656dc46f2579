"""Tensors in safetensors files (https://huggingface.co/docs/safetensors).

The `safetensors` library writes the files. It reads the memory of evaluated arrays directly, so that any thread can
write without computing and without a copy of the array, and every dtype of MLX, including bfloat16, keeps its bits.
MLX reads the files, because the array loaders of the library go through NumPy, which has no bfloat16.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from safetensors import SafetensorError, TensorSpec, serialize, serialize_file

from clotho.storage.atomic_files import FileDigest, sync_file
from protocols.errors import CheckpointError

METADATA = {"format": "mlx"}


class StoredTensor(NamedTuple):
    """A tensor as a file stores it. dtype: `float32`, `bfloat16` and so on. data: its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


def named_arrays(tree: Any) -> dict[str, mx.array]:
    """Return the arrays of a nested or flat tree by dotted name, sorted."""
    return dict(sorted(dict(tree_flatten(tree)).items()))


CODES = {
    "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "uint64": ("U64", 8), "int64": ("I64", 8),
    "uint32": ("U32", 4), "int32": ("I32", 4), "uint16": ("U16", 2), "int16": ("I16", 2), "uint8": ("U8", 1),
    "int8": ("I8", 1),
}  # fmt: skip
"""Names of types in safetensors files, with their bytes per value."""


def write_tensors(path: Path, arrays: Mapping[str, mx.array]) -> FileDigest:
    """Write evaluated arrays to a new safetensors file and sync it to disk; from any thread.

    The file is a function of names and values: dtypes in descending order, then names. Not atomic by itself: `path`
    must be in an unfinished directory. Raises OSError if the disk refuses.
    """
    return write_stored(path, _stored(arrays))


def write_stored(
    path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str] = MappingProxyType(METADATA)
) -> FileDigest:
    """Write tensors to a new safetensors file as `write_tensors` does."""
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    try:
        serialize_file(_specs(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(mode)  # the library creates files that only their owner can read
    return sync_file(path)


def tensor_bytes(arrays: Mapping[str, mx.array]) -> bytes:
    """Return the bytes of the file that `write_tensors` writes; from any thread."""
    tensors = _stored(arrays)
    return serialize(_specs(tensors), metadata=METADATA)


def parse_tensors(content: bytes) -> dict[str, mx.array]:
    """Read all arrays of the bytes of a safetensors file, in a compute thread. Raises CheckpointError."""
    return _evaluated(io.BytesIO(content), "the safetensors data")


def read_tensors(path: Path) -> dict[str, mx.array]:
    """Read all arrays of a safetensors file, in a compute thread. Raises CheckpointError if the file is damaged."""
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is not a .safetensors file; other formats are not supported")
    return _evaluated(str(path), str(path))


def _evaluated(source: Any, name: str) -> dict[str, mx.array]:
    try:
        arrays = mx.load(source, format="safetensors")
        assert isinstance(arrays, dict)
        mx.eval(arrays)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{name} cannot be read: {' '.join(str(error).split())[:300]}") from error
    return arrays


def _stored(arrays: Mapping[str, mx.array]) -> dict[str, StoredTensor]:
    return {name: as_stored(array) for name, array in arrays.items()}


def as_stored(array: mx.array) -> StoredTensor:
    """Return the bytes of an evaluated array; a view if it is contiguous."""
    return StoredTensor(str(array.dtype).removeprefix("mlx.core."), array.shape, _bytes(array))


def as_array(tensor: StoredTensor) -> mx.array:
    """Return the array of `as_stored`, lazy, in a compute thread."""
    bits = mx.array(tensor.data.view(f"u{CODES[tensor.dtype][1]}"))
    return bits.view(getattr(mx, tensor.dtype)).reshape(tensor.shape)


def _specs(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorSpec]:
    """Return descriptions that point to the bytes of the tensors, which must stay alive."""
    return {
        name: TensorSpec(dtype=dtype, shape=list(shape), data_ptr=data.ctypes.data, data_len=data.nbytes)
        for name, (dtype, shape, data) in tensors.items()
    }


def _bytes(array: mx.array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of an evaluated array in row-major order; a view if the array is contiguous."""
    if array.nbytes == 0:
        return np.empty(0, np.uint8)
    view = memoryview(array)  # type: ignore[arg-type]
    return np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)
