"""Memory in use in the process of the soak run: an added actor that writes samples.

Resident memory also contains what malloc and MLX keep for reuse, and varies with it by tens of megabytes. Memory in use
does not, so that it shows a leak of a few megabytes.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import mlx.core as mx
import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from training_run.supervision.custom_actors import Services

INTERVAL_SECONDS = 2.0


class MemoryInUse(Struct, frozen=True, kw_only=True):
    """One sample, in bytes. at: time of the monotonic clock, which all processes share.

    mlx: arrays of MLX. other: all other blocks of malloc, which contain neither arrays nor MLX's cache.
    """

    at: float
    mlx: int
    other: int


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def memory_in_use() -> MemoryInUse:
    """Return the memory in use now. MLX allocates with malloc on the CPU. Needs glibc 2.33 or later."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found, mlx = mallinfo(), mx.get_active_memory()
    other = found.uordblks + found.hblkhd - mlx - mx.get_cache_memory()
    return MemoryInUse(at=time.monotonic(), mlx=mlx, other=other)


class MemoryProbe:
    """Appends a sample to a file every `INTERVAL_SECONDS`."""

    def __init__(self, *, name: str, services: Services, file: str) -> None:
        self.name, self._file = name, Path(file)

    async def run(self) -> None:
        """Write samples until cancelled."""
        while True:
            line = msgspec.json.encode(memory_in_use()) + b"\n"
            with self._file.open("ab") as file:
                file.write(line)
            await anyio.sleep(INTERVAL_SECONDS)
