"""What the kernels for Metal add to the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

    from clotho.backend import Backend


def backend(kind: mx.DeviceType) -> Backend | None:
    """Return the backend of Metal; None for a CPU and for CUDA."""
    import mlx.core as mx

    if kind != mx.gpu or not mx.metal.is_available():
        return None
    from attachments.metal.backend import MetalBackend

    return MetalBackend()
