"""The backend of Metal: MLX, with layers of decode steps replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.nn as nn
import structlog

from attachments.metal import add_norm, norm_rotation
from attachments.metal.attention import fusible, install
from attachments.metal.blocks import fusible_blocks, install_blocks
from clotho.backend import Backend

log = structlog.get_logger(__name__)

LARGEST_DIFFERENCE = 0.02
"""Largest difference of a result from that of MLX's operations, relative to the largest value: two roundings to
bfloat16 differ by 2^-8 each."""


class Fusion(NamedTuple):
    """A kernel and the layers that use it.

    layers: of a model that can use it. difference: of the kernel from MLX's operations, for a layer. install: let
    layers use it.
    """

    kernel: str
    layers: Callable[[nn.Module], Sequence[Any]]
    difference: Callable[[Any], float]
    install: Callable[[Sequence[Any]], None]


FUSIONS = (
    Fusion("norm_rotation", fusible, lambda layer: norm_rotation.difference(layer), install),
    Fusion("add_norm", fusible_blocks, lambda block: add_norm.difference(block), install_blocks),
)


class MetalBackend(Backend):
    """MLX computes everything, in decode steps with kernels of `attachments.metal`."""

    def install_layers(self, model: nn.Module) -> None:
        """Replace layers by such with a kernel that computes what MLX computes on this machine."""
        for fusion in FUSIONS:
            layers = fusion.layers(model)
            if layers and _is_equal(fusion, layers[0]):
                fusion.install(layers)


def _is_equal(fusion: Fusion, layer: Any) -> bool:
    try:
        found = fusion.difference(layer)
    except (RuntimeError, ValueError) as error:
        log.warning("metal_kernel_not_used", kernel=fusion.kernel, reason=str(error).partition("\n")[0])
        return False
    is_equal = found <= LARGEST_DIFFERENCE  # not if it is not a number
    if not is_equal:
        log.warning("metal_kernel_not_used", kernel=fusion.kernel, difference=found)
    return is_equal
