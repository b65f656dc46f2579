"""The CPU backend as the library calls it."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from attachments.cpu import layers
from attachments.cpu.kv_cache import HostKVCache
from attachments.cpu.prompts import HostPrefillBatch
from attachments.cpu.sampling import can_sample, sample_on_host
from attachments.cpu.supported import make_host_decoder
from clotho.backend import Backend
from clotho.inference.prefill import RowDecoder
from clotho.inference.rows import RowParameters, RowSampler

KEPT_ONCE = ("v_proj", "gate_proj", "up_proj", "w1", "w3")
"""Last part of the name of linear layers whose output is kept once for the backward pass."""


class CpuBackend(Backend):
    """Decodes and samples in NumPy, and trains with closed-form gradients; each where it applies, otherwise MLX."""

    chunk_logits = 2**20  # a chunk should stay in the cache of the processor
    chunk_rows = 32

    def compute_path(self, blas: str) -> str:
        """Describe what computes in this process."""
        return f"host: NumPy/BLAS decode, {blas}"

    def install_layers(self, model: nn.Module) -> None:
        """Replace gates, norms, rotations and LoRA layers."""
        layers.install_cpu_layers(model)

    def exp(self, x: mx.array) -> mx.array:
        """Return e^x as a power."""
        return layers.exp(x)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | str | None
    ) -> mx.array | None:
        """Compute attention in float32."""
        return layers.attend(queries, keys, values, scale=scale, mask=mask)

    def row_decoder(self, model: nn.Module) -> RowDecoder | None:
        """Decode a model of supported layers in NumPy."""
        decoder = make_host_decoder(model)
        if decoder is None:
            return None
        return RowDecoder(decoder.computing, partial(HostKVCache, decoder), partial(HostPrefillBatch, decoder))

    def row_sampler(self, parameters: RowParameters) -> RowSampler | None:
        """Sample in NumPy, except with a repetition penalty or alternatives."""
        return sample_on_host if can_sample(parameters) else None

    def folds_adapters(self, itemsize: int) -> bool:
        """Return False for float32, whose LoRA layers are those of `install_layers`."""
        return itemsize != mx.float32.size

    def keeps_once(self, layer: str, itemsize: int) -> bool:
        """Whether the gradients in closed form keep the output of a layer once."""
        return layer in KEPT_ONCE and itemsize == mx.float32.size
