"""Which machine this is.

How much memory MLX holds, and may keep.

MLX's random state as plain integers. It belongs to a thread: use this in the compute thread.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from protocols.summary import MachineDescription


def describe_machine(*, blas: str) -> MachineDescription:
    """Chip, cores, memory and MLX backend. `blas` is what `load_blas` returned; it only matters on the CPU."""
    info = mx.device_info(mx.default_device())
    device = str(info.get("device_name", info.get("architecture", "unknown")))
    return MachineDescription(
        processor=_processor(),
        cores=_usable_cores(),
        memory_bytes=physical_memory(),
        backend=backend_name(),
        device=device,
        mlx_version=version("mlx"),
        blas=blas,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def physical_memory() -> int:
    """Installed memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def backend_name() -> str:
    """Metal, CUDA or CPU: where arrays are computed by default."""
    if mx.default_device().type == mx.cpu:
        return "CPU"
    return "Metal" if mx.metal.is_available() else "CUDA"


def _usable_cores() -> int:
    """Cores this process may use, which a container or `taskset` can make fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if platform.system() == "Darwin":
        return str(mx.device_info(mx.gpu).get("device_name", "")) or "Apple"
    return platform.processor() or platform.machine()


def limit_buffer_cache(limit_bytes: int) -> None:
    """Bound the freed buffers that MLX keeps for reuse; variable lengths make them grow otherwise."""
    mx.set_cache_limit(limit_bytes)


def peak_memory() -> int:
    """Most bytes of arrays held at once since the process began."""
    return mx.get_peak_memory()


def random_state() -> tuple[int, ...]:
    """The calling thread's random state: the two 32-bit halves of its key, the upper first."""
    arrays = cast("Iterable[mx.array]", mx.random.state)
    return tuple(int(word) for array in arrays for word in np.array(array).reshape(-1))


def restore_random_state(words: tuple[int, ...]) -> None:
    """Continue the calling thread's random numbers from a state that `random_state` gave.

    A key is the seed it came from, split into halves (`mx.random.key`), so seeding with a key's own value restores it;
    the state itself cannot be assigned to in every version of MLX.
    """
    upper, lower = words
    mx.random.seed(upper << 32 | lower)
