"""The machine: its description, MLX's memory, and MLX's random state."""

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
    """Describe processor, cores, memory and MLX backend. blas: the result of `load_blas`; only relevant on the CPU."""
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
    """Return the installed memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def backend_name() -> str:
    """Return Metal, CUDA or CPU: the default device of MLX."""
    if mx.default_device().type == mx.cpu:
        return "CPU"
    return "Metal" if mx.metal.is_available() else "CUDA"


def _usable_cores() -> int:
    """Return the number of cores that this process may use, which containers and `taskset` can reduce."""
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
    """Limit the freed buffers that MLX keeps for reuse; with variable lengths they would grow without limit."""
    mx.set_cache_limit(limit_bytes)


def peak_memory() -> int:
    """Return the peak memory of arrays since the process started, in bytes."""
    return mx.get_peak_memory()


def random_state() -> tuple[int, ...]:
    """Return the random state of the calling thread: the two 32-bit halves of its key, upper half first."""
    arrays = cast("Iterable[mx.array]", mx.random.state)
    return tuple(int(word) for array in arrays for word in np.array(array).reshape(-1))


def restore_random_state(words: tuple[int, ...]) -> None:
    """Restore the random state of the calling thread that `random_state` returned.

    A key is its seed, split into halves (`mx.random.key`), so seeding with the value of a key restores it. The state
    itself cannot be assigned in every version of MLX.
    """
    upper, lower = words
    mx.random.seed(upper << 32 | lower)
