"""What runs, and on what: plain facts for the screen, the log and the dry run."""

from __future__ import annotations

from msgspec import Struct


class PolicyDescription(Struct, frozen=True, kw_only=True):
    """The policy in numbers.

    architecture: the checkpoint's `model_type`. parameters: of the base, quantised ones counted as what they stand for.
    trainable_parameters: of the adapter, of weights trained beside it, or of the whole model. bytes: of every array
    held, adapter included. quantization_bits: None where the base is not quantised. dtype: what it computes in.
    layers: blocks.
    """

    architecture: str
    parameters: int
    trainable_parameters: int
    bytes: int
    quantization_bits: int | None
    dtype: str
    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int


class MachineDescription(Struct, frozen=True, kw_only=True):
    """The machine. backend: Metal, CUDA or CPU; memory_bytes: installed, unified memory on Apple silicon."""

    processor: str
    cores: int
    memory_bytes: int
    backend: str
    device: str
    mlx_version: str
    blas: str
    system: str
