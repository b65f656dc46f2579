"""The structure of a GGUF file, checked before `mlx.core.load` reads it: its C parser trusts every length in the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. All numbers are little-endian.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path

from protocols.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1_000_000
"""Largest number of tensors, of metadata entries, and of values of an array that is read."""

MAX_DEPTH = 2
"""Arrays of numbers and strings have depth 1; deeper nesting is not used by any model."""

SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Size in bytes of each type of metadata value."""

STRING, ARRAY = 8, 9

BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip
"""Number of weights and of bytes of a block, by type of tensor."""


class _Header:
    """Reads a file from its beginning; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0

    def skip(self, size: int) -> int:
        """Move on by `size` bytes; return where they start."""
        start, self.place = self.place, self.place + size
        if size < 0 or self.place > len(self.data):
            raise ValueError("it ends before its header does")
        return start

    def number(self, form: str) -> int:
        """Read one number in a format of `struct`."""
        return int(struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(f"<{form}")))[0])

    def count(self, what: str) -> int:
        """Read a 64-bit number of entries."""
        found = self.number("Q")
        if found > MAX_ENTRIES:
            raise ValueError(f"it declares {found} {what}")
        return found

    def text(self) -> str:
        """Read a string. Raises ValueError if it is not UTF-8."""
        size = self.number("Q")
        start = self.skip(size)
        return self.data[start : start + size].decode()

    def value(self, kind: int, depth: int = 0) -> None:
        """Skip a metadata value."""
        if kind in SCALARS:
            self.skip(SCALARS[kind])
        elif kind == STRING:
            self.text()
        elif kind == ARRAY and depth < MAX_DEPTH:
            inner, size = self.number("I"), self.count("values of an array")
            if inner in SCALARS:
                self.skip(SCALARS[inner] * size)
                return
            for _ in range(size):
                self.value(inner, depth + 1)
        else:
            raise ValueError(f"it has a metadata value of the unknown type {kind}")


def check_header(path: Path) -> None:
    """Check that every length, type and offset of the file is possible. Raises ModelError."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file")
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path} is not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _check(_Header(data))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not a valid GGUF file: {str(error)[:200]}") from error


def _check(header: _Header) -> None:
    header.skip(len(MAGIC))
    if (version := header.number("I")) not in VERSIONS:
        raise ValueError(f"its version is {version}; versions 2 and 3 are supported")
    tensors, entries = header.count("tensors"), header.count("metadata entries")
    alignment = 32
    for _ in range(entries):
        key, kind, start = header.text(), header.number("I"), header.place
        header.value(kind)
        if key == "general.alignment" and kind == 4:
            alignment = int.from_bytes(header.data[start : start + 4], "little")
    ends = [_tensor_end(header) for _ in range(tensors)]
    if alignment < 1 or alignment % 8:
        raise ValueError(f"its alignment is {alignment}")
    beginning = -(-header.place // alignment) * alignment
    if ends and beginning + max(ends) > len(header.data):
        raise ValueError(f"it has {len(header.data)} bytes, and its tensors need {beginning + max(ends)}")


def _tensor_end(header: _Header) -> int:
    """Skip the description of a tensor; return the end of its data, from the beginning of all data."""
    name, dimensions = header.text(), header.number("I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"the tensor {name[:60]!r} has {dimensions} dimensions")
    shape = [header.number("Q") for _ in range(dimensions)]
    kind, offset = header.number("I"), header.number("Q")
    if kind not in BLOCKS:
        raise ValueError(f"the tensor {name[:60]!r} has the unsupported quantization type {kind}")
    weights, size = BLOCKS[kind]
    if not all(shape) or shape[0] % weights:
        raise ValueError(f"the tensor {name[:60]!r} has the shape {shape}")
    return offset + prod(shape) // weights * size
