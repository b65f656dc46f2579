"""Arrays in safetensors files, written from any thread without computing anything, and every bit preserved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from protocols.errors import CheckpointError

DTYPE_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.bool_: "BOOL",
}


def named_arrays(tree: Any) -> dict[str, mx.array]:
    """Arrays of a nested or flat tree by their dotted names, sorted."""
    return dict(sorted(dict(tree_flatten(tree)).items()))


def tensor_chunks(arrays: Mapping[str, mx.array]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: length of the header, the header, the arrays one after another.

    https://huggingface.co/docs/safetensors#format. The library's own writers go through NumPy, which has no bfloat16,
    or through MLX, which computes in the calling thread; this reads the evaluated arrays where they lie.
    Equal arrays give equal files. Widest types come first, so that every array is aligned.
    """
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, array in ordered:
        end = offset + array.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, array in ordered:
        view = memoryview(array)  # type: ignore[arg-type]
        yield view if view.c_contiguous else view.tobytes()


def read_tensors(path: Path) -> dict[str, mx.array]:
    """Read a safetensors file whole; call it in the compute thread. Raises `CheckpointError` if it is damaged."""
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is not a .safetensors file; nothing else is read")
    try:
        arrays = mx.load(str(path), format="safetensors")
        assert isinstance(arrays, dict)
        mx.eval(arrays)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    return arrays
