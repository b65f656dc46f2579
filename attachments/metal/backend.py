"""The backend of Metal: MLX, with layers of decode steps replaced."""

from __future__ import annotations

import mlx.nn as nn
import structlog

from attachments.metal.attention import fusible, install
from attachments.metal.norm_rotation import difference
from clotho.backend import Backend

log = structlog.get_logger(__name__)

LARGEST_DIFFERENCE = 0.02
"""Largest difference of a result from that of MLX's operations, relative to the largest value: two roundings to
bfloat16 differ by 2^-8 each."""


class MetalBackend(Backend):
    """MLX computes everything, in decode steps with kernels of `attachments.metal`."""

    def install_layers(self, model: nn.Module) -> None:
        """Replace attention layers, if their kernel computes what MLX computes on this machine."""
        layers = fusible(model)
        if not layers:
            return
        try:
            found = difference(layers[0])
        except (RuntimeError, ValueError) as error:
            log.warning("metal_kernel_not_used", kernel="norm_rotation", reason=str(error).partition("\n")[0])
            return
        if not found <= LARGEST_DIFFERENCE:  # also if it is not a number
            log.warning("metal_kernel_not_used", kernel="norm_rotation", difference=found)
            return
        install(layers)
