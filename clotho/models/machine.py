"""The machine: its memory and cores, MLX's memory, and MLX's random state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from clotho.process import DIVIDED_PARAMETERS, divide_cores, usable_cores
from protocols.compute import MemoryLimit

CGROUP = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")

TF32_SIZE = 512
"""Rows and columns of a product for which MLX takes the kernels of large matrices."""

LEAST_CACHE = 256 * 2**20
"""Bytes of freed buffers that MLX may keep even if what the run always holds leaves no memory for them."""


def core_division(parameters: int) -> Callable[[int], None]:
    """Return what divides the cores between threads; without effect on a GPU and for small models."""
    divides = mx.default_device() == mx.Device(mx.cpu) and parameters >= DIVIDED_PARAMETERS
    return divide_cores if divides else lambda threads: None


def compute_slots() -> int:
    """Return how many threads compute at once: one on a GPU; on the CPU two, or one with a single core."""
    return min(2, usable_cores()) if mx.default_device() == mx.Device(mx.cpu) else 1


def physical_memory() -> int:
    """Return the installed memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit() -> MemoryLimit:
    """Return how much memory the arrays of a run may take.

    On Metal, this is the recommended working-set size of the device: two thirds to three quarters of the installed
    memory, or the value of `sudo sysctl iogpu.wired_limit_mb=...`. On a GPU with memory of its own, it is that memory.
    On the CPU, it is the installed memory, or the limit of the control group (container) if that is smaller.
    """
    installed = physical_memory()
    if mx.default_device().type != mx.cpu:
        info = mx.device_info(mx.default_device())
        if recommended := int(info.get("max_recommended_working_set_size", 0)):
            return MemoryLimit(bytes=recommended, source="metal", installed=int(info.get("memory_size", installed)))
        if own := int(info.get("total_memory", 0)):
            return MemoryLimit(bytes=own, source="gpu", installed=own)
    group = min((limit for limit, _ in _cgroups()), default=installed)
    if group < installed:
        return MemoryLimit(bytes=group, source="cgroup", installed=installed)
    return MemoryLimit(bytes=installed, source="installed", installed=installed)


def cgroup_headroom() -> int | None:
    """Return the bytes below the limits of control groups, droppable pages included; None without a limit."""
    return min((limit - used for limit, used in _cgroups()), default=None)


def _cgroups() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of the control groups of this process with a memory limit, ancestors included."""
    with suppress(OSError):
        for line in CGROUP_MEMBERSHIP.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _limited(CGROUP, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _limited(CGROUP / "memory", path, *names)


def _limited(root: Path, path: str, limit_file: str, use_file: str, droppable: str) -> Iterator[tuple[int, int]]:
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        with suppress(OSError, ValueError):  # no such group in this namespace, or the word "max"
            limit, used = (int((directory / name).read_text(encoding="ascii")) for name in (limit_file, use_file))
            statistics = dict(line.split() for line in (directory / "memory.stat").read_text("ascii").splitlines())
            if limit < physical_memory():
                yield limit, used - int(statistics.get(droppable, 0))
        if directory == root:
            return


def backend_name() -> str:
    """Return Metal, CUDA or CPU: the default device of MLX."""
    if mx.default_device().type == mx.cpu:
        return "CPU"
    return "Metal" if mx.metal.is_available() else "CUDA"


@cache
def uses_tf32() -> bool:
    """Whether products of large float32 matrices keep 11 significant bits of their inputs (TF32), as on recent GPUs.

    It is measured, because it depends on the chip, the version of macOS, the wheel of MLX and `MLX_ENABLE_TF32`.
    """
    inputs = mx.full((TF32_SIZE, TF32_SIZE), 1.0 + 2.0**-12)  # rounded to 1 in TF32, exact in float32
    return bool(mx.any(mx.matmul(inputs, mx.eye(TF32_SIZE)) != inputs).item())


def limit_mlx_memory(limit: MemoryLimit, *, held: int, cache: int) -> None:
    """Limit the memory of MLX to `limit`, and the freed buffers that it keeps for reuse.

    Above the memory limit, MLX returns freed buffers to the system, and waits for running work before it allocates.
    MLX's default on Metal is 1.5 times the recommended working-set size. With variable lengths, freed buffers would
    grow without limit: they get `cache` bytes, less if `held`, what the run needs at least, leaves less of the limit.
    The worst case of a run does not count: MLX returns freed buffers when arrays come near the memory limit, and with
    too small a cache every step would fetch its buffers from the system again.
    """
    mx.set_memory_limit(min(limit.bytes, mx.get_memory_limit()))
    mx.set_cache_limit(min(cache, max(LEAST_CACHE, limit.bytes - held)))


def free_buffers() -> None:
    """Return the freed buffers that MLX keeps for reuse to the system."""
    mx.clear_cache()


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
