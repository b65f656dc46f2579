"""The machine of a run: its description, and the memory of MLX that only runs ask about."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from clotho.models.machine import backend_name, physical_memory
from clotho.process import usable_cores
from protocols.compute import MachineDescription
from protocols.errors import ProfileError


def describe_machine(*, blas: str) -> MachineDescription:
    """Describe processor, cores, memory and MLX backend. blas: the result of `load_blas`; only relevant on the CPU."""
    info = mx.device_info(mx.default_device())
    device = str(info.get("device_name", info.get("architecture", "unknown")))
    return MachineDescription(
        processor=_processor(),
        cores=usable_cores(),
        memory_bytes=physical_memory(),
        backend=backend_name(),
        device=device,
        mlx_version=version("mlx"),
        blas=blas,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if platform.system() == "Darwin":
        return str(mx.device_info(mx.gpu).get("device_name", "")) or "Apple"
    return platform.processor() or platform.machine()


def wire_memory(limit_mb: int) -> None:
    """Let macOS keep up to `limit_mb` MiB of arrays resident. Raises ProfileError if macOS or MLX refuses it."""
    try:
        mx.set_wired_limit(limit_mb * 2**20)
    except (ValueError, RuntimeError) as error:
        raise ProfileError(f"memory.wired_limit_mib = {limit_mb}: {' '.join(str(error).split())}") from error


def peak_memory() -> int:
    """Return the peak memory of arrays since the process started, in bytes."""
    return mx.get_peak_memory()
