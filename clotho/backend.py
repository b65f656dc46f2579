"""The backend: what computes decoding, sampling and parts of training. MLX, unless an attachment offers another one.

MLX is imported when a method needs it, because `library.py` may be imported before the BLAS is loaded.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from clotho.extension import Door

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from clotho.inference.prefill import RowDecoder
    from clotho.inference.rows import RowParameters, RowSampler

SWITCH = "CLOTHO_CPU_KERNELS"
"""Variable of the environment: with 0, MLX computes everything, whatever the attachments offer."""


class Backend:
    """MLX computes everything. A subclass replaces what it computes faster, and gives equal results up to rounding.

    chunk_logits: maximum number of logits (rows x vocabulary) that the output head computes at once. chunk_rows: its
    minimum number of rows: each chunk reads all weights of the head, and a GPU needs many rows to be busy.
    """

    chunk_logits = 2**24
    chunk_rows = 128

    def compute_path(self, blas: str, *, decodes: bool) -> str:
        """Describe what computes in this process, for the startup screen.

        blas: the result of `load_blas`. decodes: whether the engine decodes with a `row_decoder` of the backend.
        """
        import mlx.core as mx

        if mx.default_device() != mx.Device(mx.cpu):
            from clotho.models.machine import uses_tf32

            return "GPU: MLX, float32 products in TF32 (11 bits)" if uses_tf32() else "GPU: MLX"
        return f"host: MLX kernels{'' if _is_on() else f' ({SWITCH}=0)'}, {blas}"

    def install_layers(self, model: nn.Module) -> None:
        """Replace layers of a loaded model by equivalent ones; modules stay the same objects."""

    def exp(self, x: mx.array) -> mx.array:
        """Return e^x for float32."""
        import mlx.core as mx

        return mx.exp(x)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | str | None
    ) -> mx.array | None:
        """Compute attention of queries (B, heads, Q, size) over keys and values (B, key heads, S, size) for training.

        mask: booleans (B or 1, 1, Q, S), True where a query attends to a key; "causal"; or None. Returns None if mlx-lm
        should compute it.
        """
        return None

    def row_decoder(self, model: nn.Module) -> RowDecoder | None:
        """Return what decodes the rows of a model; None if the model itself does."""
        return None

    def row_sampler(self, parameters: RowParameters) -> RowSampler | None:
        """Return what samples rows with these parameters on the host; None if `clotho.inference.sampling` does."""
        return None

    def folds_adapters(self, itemsize: int) -> bool:
        """Whether decoding computes with folded adapters. itemsize: bytes per number of the compute type."""
        return True

    def keeps_once(self, layer: str, itemsize: int) -> bool:
        """Whether the backward pass keeps the output of a linear layer once, and no copy for the operation behind it.

        layer: last part of its name. itemsize: bytes per number of the compute type.
        """
        return False


BACKEND: Door[[mx.DeviceType], Backend | None] = Door("library.backend")
"""Returns what computes on a kind of device instead of MLX; None if MLX does."""


def backend() -> Backend:
    """Return what computes on the default device of MLX."""
    import mlx.core as mx

    return backend_of(mx.default_device().type)


@cache
def backend_of(kind: mx.DeviceType) -> Backend:
    """Return what computes on a kind of device: what an attachment offers for it, otherwise MLX."""
    return (BACKEND.first(kind) if _is_on() else None) or Backend()


def _is_on() -> bool:
    return os.environ.get(SWITCH, "1") != "0"
