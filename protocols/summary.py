"""Pipeline -> screen: what came of a run.

Everyone who can be measured -> monitor: numbers to be looked at whenever somebody looks.

What runs, and on what: plain facts for the screen, the log and the dry run.

How much memory a run will hold, part by part.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from protocols.accounting import Balance
from protocols.evaluation import EvalReport


class QueueGauge(Struct, frozen=True, kw_only=True):
    """State of a queue. depth, capacity: number of messages."""

    name: str
    depth: int
    capacity: int


class RunGauges(Struct, frozen=True, kw_only=True):
    """The run at one moment. Totals count since this process began; None where nothing was measured yet.

    tokens_sampled, decode_seconds: totals of the decode engine, API requests included.
    decode_rate_idle, decode_rate_learning: tokens per second of decoding alone, and while the learner has work.
    rows_running: sequences being decoded. api_requests: total. swaps: updates that were put in service; last, median
    and longest took so many seconds. peak_memory_bytes: of arrays held at once.
    """

    queues: tuple[QueueGauge, ...] = ()
    tokens_sampled: int = 0
    decode_seconds: float = 0.0
    decode_rate_idle: float | None = None
    decode_rate_learning: float | None = None
    rows_running: int = 0
    api_requests: int = 0
    swaps: int = 0
    swap_seconds_last: float | None = None
    swap_seconds_median: float | None = None
    swap_seconds_max: float | None = None
    peak_memory_bytes: int = 0


Gauges = Callable[[], RunGauges]
"""Reads the gauges; called from any thread, returns at once."""


class RunSummary(Struct, frozen=True, kw_only=True):
    """Result of a run. before, after: evaluations; None if there is none.

    steps: steps consumed; planned_steps: steps of the complete run. training_seconds: from the first prompt to the last
    update; update_seconds: total time of updates, over all processes of the run; evaluation_seconds: total time of
    evaluations; total_seconds: of this process. base_model: directory or repository; adapter: the adapter directory,
    which mlx-lm loads. resume_command: command line that continues the run.
    """

    steps: int
    planned_steps: int
    version: int
    before: EvalReport | None
    after: EvalReport | None
    balance: Balance
    gauges: RunGauges
    training_seconds: float
    update_seconds: float
    evaluation_seconds: float
    total_seconds: float
    base_model: str
    adapter: str
    resume_command: str


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


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """Bytes of arrays at the moment when most are held, the engine's caches being full.

    base: frozen weights. trained: the adapter, and weights that are trained in full.
    optimizer: its state, float32 copies of narrower weights among it. reference: weights kept for the penalty.
    rollback: the two older versions that a run which collapses may go back to. midway: weights and state between the
    optimizer steps of one update, where it takes several.
    caches: keys, values and states of the running sequences. prefixes: of computed prompts kept for later requests.
    gradients: in float32; twice where an update has several micro-batches.
    activations, logits: of one micro-batch's backward pass, in the blocks and in the head.
    update: a gradient, and the new weights and optimizer state beside the old. decode: what one decoding step computes
    with. margin: allowance for temporary arrays that the parts above do not count.
    one_sequence: the part of `caches` that a single sequence of the longest length needs.
    shipped_shape: whether the model is known only by a configuration that ships with the project.
    """

    base: int
    trained: int
    optimizer: int
    reference: int
    rollback: int
    midway: int
    caches: int
    prefixes: int
    gradients: int
    activations: int
    logits: int
    update: int
    decode: int
    margin: int = 0
    one_sequence: int = 0
    shipped_shape: bool = False

    @property
    def held(self) -> int:
        """What stays from one turn of the compute thread to the next."""
        learning = self.trained + self.optimizer + self.reference + self.rollback + self.midway
        return self.base + learning + self.caches + self.prefixes

    @property
    def total(self) -> int:
        """What is held, and the largest of the three that take turns: backward pass, update, decoding step."""
        return self.held + self.turn + self.margin

    @property
    def turn(self) -> int:
        """Bytes of the largest of backward pass, optimizer step and decode step, which never run at once."""
        return max(self.gradients + self.activations + self.logits, self.update, self.decode)

    @property
    def minimum(self) -> int:
        """Bytes that the run needs however few sequences it decodes at once: `total` with the cache of one sequence."""
        return self.total - self.caches - self.prefixes + self.one_sequence


class MemoryPart(Struct, frozen=True, kw_only=True):
    """One line of an estimate. change: the settings that make it smaller, or why there are none."""

    component: str
    bytes: int
    change: str
