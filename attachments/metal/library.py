"""What the kernels for Metal add to the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clotho.extension import Extension

if TYPE_CHECKING:
    import mlx.core as mx

    from clotho.backend import Backend


class MetalExtension(Extension):
    """Computes decode steps with fewer kernels on Metal."""

    def backend(self, kind: mx.DeviceType) -> Backend | None:
        """Return the backend of Metal; None for a CPU and for CUDA."""
        import mlx.core as mx

        if kind != mx.gpu or not mx.metal.is_available():
            return None
        from attachments.metal.backend import MetalBackend

        return MetalBackend()


EXTENSION = MetalExtension()
"""The kernels for Metal as the library calls them."""
