"""What the CPU backend adds to the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

    from clotho.backend import Backend


def backend(kind: mx.DeviceType) -> Backend | None:
    """Return the backend of the CPU; None for a GPU."""
    import mlx.core as mx

    if kind != mx.cpu:
        return None
    from attachments.cpu.backend import CpuBackend

    return CpuBackend()
