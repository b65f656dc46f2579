"""What computes, as it describes and measures itself: the machine, the policy, and times and counts of the work."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Distribution(Struct, frozen=True, kw_only=True):
    """Values in buckets, for a Prometheus histogram.

    bounds: upper bounds of the buckets, without infinity. counts: number of values per bucket; the last bucket has no
    upper bound. total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class SpeculationCounts(Struct, frozen=True, kw_only=True):
    """Speculation of the decode engine since it was created.

    passes: number of forward passes over a row, with or without a draft; 0 if speculation is off. drafts: number of
    drafts. draft_tokens: number of their tokens. accepted_by_position: how many drafts had their
    first, second, ... token accepted; the sum is the number of accepted tokens.
    """

    passes: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()

    @property
    def accepted_tokens(self) -> int:
        """Number of accepted tokens of all drafts."""
        return sum(self.accepted_by_position)


class ComputeTotals(Struct, frozen=True, kw_only=True):
    """What the compute threads did in some time, in seconds.

    decode, update, other: turns of decoding, of updates, and of everything else (evaluations, parity checks, scoring,
    calls). overlap: time in which two threads computed. processor: time of all cores that the process used.
    """

    decode: float = 0.0
    update: float = 0.0
    other: float = 0.0
    overlap: float = 0.0
    processor: float = 0.0

    @property
    def busy(self) -> float:
        """Time in which at least one thread computed, if at most two do."""
        return self.decode + self.update + self.other - self.overlap

    def since(self, before: ComputeTotals) -> ComputeTotals:
        """Return the totals from `before` until these."""
        return ComputeTotals(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


class PolicyDescription(Struct, frozen=True, kw_only=True):
    """Sizes and types of the policy.

    architecture: `model_type` of the configuration. parameters: number of weights of the base model; a quantized weight
    counts once. trainable_parameters: number of trainable weights. bytes: memory of all arrays, adapter included.
    quantization_bits: None if the base model is not quantized. dtype: type of computation. layers: number of blocks.
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
    """The machine. backend: Metal, CUDA or CPU. memory_bytes: installed memory (unified memory on Apple silicon)."""

    processor: str
    cores: int
    memory_bytes: int
    backend: str
    device: str
    mlx_version: str
    blas: str
    system: str


class MemoryLimit(Struct, frozen=True, kw_only=True):
    """Memory that the arrays of a run may take. installed: memory of the machine, or of a GPU with its own memory.

    source: what sets the limit: the recommended working-set size of Metal, the memory of a GPU, the control group
    (container) of the process, or the installed memory.
    """

    bytes: int
    source: Literal["metal", "gpu", "cgroup", "installed"]
    installed: int
