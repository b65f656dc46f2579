"""What the CPU backend adds to the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clotho.extension import Extension

if TYPE_CHECKING:
    import mlx.core as mx

    from clotho.backend import Backend


class CpuExtension(Extension):
    """Computes with NumPy and closed-form gradients on the CPU."""

    def backend(self, kind: mx.DeviceType) -> Backend | None:
        """Return the backend of the CPU; None for a GPU."""
        import mlx.core as mx

        if kind != mx.cpu:
            return None
        from attachments.cpu.backend import CpuBackend

        return CpuBackend()


EXTENSION = CpuExtension()
