"""Which machine this is."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from protocols.description import MachineDescription


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
