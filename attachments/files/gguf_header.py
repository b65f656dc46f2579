"""The header of a GGUF file: metadata, and the names, shapes and types of its tensors.

The header is checked before `mlx.core.load` reads the file, because its C parser trusts every length in the file.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All numbers are little-endian.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from clotho.models.model_files import require_file
from protocols.errors import ModelError, visible

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1_000_000
"""Largest number of tensors, of metadata entries, and of values of an array that is read."""

MAX_DEPTH = 2
"""Arrays of numbers and strings have depth 1; deeper nesting is not used by any model."""

SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""NumPy's name of each type of metadata value."""

STRING, ARRAY = 8, 9

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
BLOCKS = {
    F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), 6: (32, 22), 7: (32, 24), Q8_0: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 24: (1, 1),
    25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), BF16: (1, 2),
}  # fmt: skip
"""Number of weights and of bytes of a block, by type of tensor."""


class TensorInfo(Struct, frozen=True, kw_only=True):
    """A tensor: its shape, outermost dimension first, its type, and the position of its first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GgufHeader(Struct, frozen=True, kw_only=True):
    """Metadata (texts, numbers, lists of texts, arrays of numbers) and tensors, by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Reader:
    """Reads a file from its beginning; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0

    def take(self, size: int) -> bytes:
        """Read `size` bytes."""
        start, self.place = self.place, self.place + size
        if self.place > len(self.data):
            raise ValueError("it ends before its header does")
        return self.data[start : self.place]

    def number(self, form: str) -> int:
        """Read one number in a format of `struct`."""
        return int(struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0])

    def count(self, what: str) -> int:
        """Read a 64-bit number of entries."""
        found = self.number("Q")
        if found > MAX_ENTRIES:
            raise ValueError(f"it declares {found} {what}")
        return found

    def text(self) -> str:
        """Read a string. Raises ValueError if it is not UTF-8."""
        return self.take(self.number("Q")).decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a metadata value."""
        if kind in SCALARS:
            return self.numbers(kind, 1)[0].item()
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth >= MAX_DEPTH:
            raise ValueError(f"it has a metadata value of the unknown type {kind}")
        inner, size = self.number("I"), self.count("values of an array")
        return self.numbers(inner, size) if inner in SCALARS else [self.value(inner, depth + 1) for _ in range(size)]

    def numbers(self, kind: int, size: int) -> np.ndarray[Any, Any]:
        """Read `size` numbers of one type."""
        form = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(size * form.itemsize), form)


def read_header(path: Path) -> GgufHeader:
    """Read the header; every length, type and offset is possible in this file. Raises ModelError."""
    require_file(path)
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path} is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Reader(data))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error) as error:
        raise ModelError(f"{path} is not a valid GGUF file: {visible(str(error), 200)}") from error


def _read(reader: _Reader) -> GgufHeader:
    reader.take(len(MAGIC))
    if (version := reader.number("I")) not in VERSIONS:
        raise ValueError(f"its version is {version}; versions 2 and 3 are supported")
    tensors, entries = reader.count("tensors"), reader.count("metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key, kind = reader.text(), reader.number("I")
        metadata[key] = reader.value(kind)
    found = dict(_tensor(reader) for _ in range(tensors))
    if len(found) != tensors:
        raise ValueError("several tensors have the same name")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise ValueError(f"its alignment is {str(alignment)[:40]}")
    data = -(-reader.place // alignment) * alignment
    needed = data + max((info.start + _bytes(info) for info in found.values()), default=0)
    if needed > len(reader.data):
        raise ValueError(f"it has {len(reader.data)} bytes, and its tensors need {needed}")
    placed = {
        name: TensorInfo(shape=info.shape, kind=info.kind, start=data + info.start) for name, info in found.items()
    }
    return GgufHeader(metadata=metadata, tensors=placed)


def _tensor(reader: _Reader) -> tuple[str, TensorInfo]:
    """Read the description of a tensor; its start counts from the beginning of all data."""
    name, dimensions = reader.text(), reader.number("I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"the tensor {name[:60]!r} has {dimensions} dimensions")
    shape = [reader.number("Q") for _ in range(dimensions)]
    kind, start = reader.number("I"), reader.number("Q")
    if kind not in BLOCKS:
        raise ValueError(f"the tensor {name[:60]!r} has the unsupported quantization type {kind}")
    if not all(shape) or shape[0] % BLOCKS[kind][0]:
        raise ValueError(f"the tensor {name[:60]!r} has the shape {shape}")
    return name, TensorInfo(shape=tuple(reversed(shape)), kind=kind, start=start)


def _bytes(info: TensorInfo) -> int:
    weights, size = BLOCKS[info.kind]
    return prod(info.shape) // weights * size
