"""Measurements for people: gauges of a run, its summary, the policy, the machine, and the memory estimate."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from protocols.accounting import Balance
from protocols.checkpoint import BestCheckpoint
from protocols.compute import ComputeTotals
from protocols.evaluation import EvalReport
from protocols.finding import Finding


class QueueGauge(Struct, frozen=True, kw_only=True):
    """State of a queue. depth, capacity: number of messages."""

    name: str
    depth: int
    capacity: int


class RunGauges(Struct, frozen=True, kw_only=True):
    """State of a run at one moment. Totals count since the last start; None means not measured yet.

    tokens_sampled: total, with those of other samplers. tokens_decoded, decode_steps, decode_seconds: totals of the
    decode engine, requests of HTTP clients included.
    decode_rate_idle, decode_rate_learning: tokens per second of decoding alone, and while the learner has work; the
    number of sequences differs between both. decode_share_learning: fraction of the compute time of the latter that
    decoding took.
    rows_running: number of sequences that are being decoded. rows_limit: how many are decoded at once at most;
    memory pressure lowers it. api_requests: number of requests of HTTP clients.
    cache_holders: requests of clients whose long completions use the KV cache while others wait for it.
    groups_scored_at_once: limit of groups whose rewards are computed at the same time. scorer_full_seconds: total of
    the time in which it was reached.
    swaps: number of weight swaps; swap_seconds_*: duration of the last, median and longest swap.
    peak_memory_bytes: peak memory of arrays.
    findings: the findings that apply now. waiting_for: what the learner waits for; empty while it computes.
    """

    queues: tuple[QueueGauge, ...] = ()
    tokens_sampled: int = 0
    tokens_decoded: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    decode_rate_idle: float | None = None
    decode_rate_learning: float | None = None
    decode_share_learning: float | None = None
    rows_running: int = 0
    rows_limit: int = 0
    api_requests: int = 0
    cache_holders: tuple[str, ...] = ()
    groups_scored_at_once: int = 0
    scorer_full_seconds: float = 0.0
    swaps: int = 0
    swap_seconds_last: float | None = None
    swap_seconds_median: float | None = None
    swap_seconds_max: float | None = None
    peak_memory_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    waiting_for: str = ""


Gauges = Callable[[], RunGauges]
"""Reads the gauges. Thread-safe; does not wait."""


class HistoryGap(Struct, frozen=True, kw_only=True):
    """Records that a history file lacks although the run made them. unit: what a line records, in the plural."""

    file: str
    unit: str
    missing: int


class RunSummary(Struct, frozen=True, kw_only=True):
    """Result of a run. before, after: evaluations before and after training; None if not evaluated.

    steps: number of batches consumed. planned_steps: number of batches of the complete run.
    training_seconds: time from the first prompt to the last update. computing: what the compute threads did in it.
    cores: that the process may use. evaluation_seconds: total time of the evaluations between updates;
    other_evaluation_seconds: of those before and after training. total_seconds: duration of this process.
    base_model: directory or repository. adapter: the adapter directory, which mlx-lm loads.
    best: the checkpoint with the highest held-out accuracy; None without evaluations. best_path: its directory.
    resume_command: command line that continues the run.
    history_gaps: what the history files lack. findings: the findings that apply at the end.
    run_dir, profile: the run directory, and the resolved profile in it. files: names of the files of the run.
    is_adapter: the training changed an adapter, not the weights of the base model. balances: of what attachments count.
    """

    steps: int
    planned_steps: int
    version: int
    before: EvalReport | None
    after: EvalReport | None
    balance: Balance
    gauges: RunGauges
    training_seconds: float
    computing: ComputeTotals
    cores: int
    evaluation_seconds: float
    other_evaluation_seconds: float
    total_seconds: float
    base_model: str
    adapter: str
    resume_command: str
    history_gaps: tuple[HistoryGap, ...] = ()
    best: BestCheckpoint | None = None
    best_path: str = ""
    findings: tuple[Finding, ...] = ()
    run_dir: str = ""
    profile: str = ""
    files: tuple[str, ...] = ()
    is_adapter: bool = True
    balances: dict[str, Balance] = {}

    @property
    def is_untrained(self) -> bool:
        """Whether all batches were consumed, and none changed the weights."""
        return self.version == 0 and 0 < self.planned_steps <= self.steps


class DatasetReport(Struct, frozen=True, kw_only=True):
    """What the datasets of a run contain.

    problems: numbers of problems for training, by type. heldout: number of held-out problems. duplicates: problems for
    training whose prompt occurs before them. overlap: held-out problems whose prompt is also trained on. fingerprint:
    of all problems.
    """

    problems: dict[str, int]
    heldout: int
    duplicates: int
    overlap: int
    fingerprint: str


class PromptReport(Struct, frozen=True, kw_only=True):
    """The rendered prompts of a run.

    shortest, median, longest: lengths of prompts for training, in tokens. measured: number of these prompts; those of a
    large dataset are rendered when they are needed. removed, removed_heldout: problems that
    `data.max_prompt_tokens` removed. first: the first prompt as the model receives it.
    """

    shortest: int
    median: float
    longest: int
    measured: int
    removed: int
    removed_heldout: int
    first: str


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """Estimated peak bytes of arrays, with full caches.

    base: frozen weights. trained: the adapter, with its copy in a 16-bit compute type, and weights trained in full.
    optimizer: optimizer state, including float32 copies of narrower weights.
    reference: weights of the reference policy for the KL penalty. rollback: the two older versions for rollbacks.
    published: the older version that weight patches for the workers of a cluster are made from.
    midway: weights and optimizer state between the optimizer steps of one update.
    padded: matrices of experts with the rank that they have in files, while a checkpoint is written.
    caches: KV caches of the running sequences. prefixes: the prefix cache. evaluation: KV caches of an evaluation
    during training. routes: routes of the rollouts that are trained on and of those in progress, which are no arrays of
    MLX (`learner.router_replay`). adapters: those that are loaded for clients, with their copies in the compute type.
    gradients: in float32; counted twice if an update has several micro-batches.
    sums: a gradient and the copies that are made while the gradients of several ranks are added.
    activations, logits: backward pass of one micro-batch, in the blocks and in the head.
    update: one optimizer step: a gradient, and new weights and optimizer state beside the old.
    decode: temporary arrays of one decode step. margin: allowance for other temporary arrays.
    freed: buffers of freed arrays that MLX keeps for reuse; not in `total`, because MLX returns them near the limit.
    one_sequence: part of `caches` for one sequence of maximum length.
    shipped_shape: the model is known only by a configuration that ships with the project.
    quantized: weights stay quantized while they compute.
    """

    base: int = 0
    trained: int = 0
    optimizer: int = 0
    reference: int = 0
    rollback: int = 0
    published: int = 0
    midway: int = 0
    padded: int = 0
    caches: int = 0
    prefixes: int = 0
    evaluation: int = 0
    routes: int = 0
    adapters: int = 0
    gradients: int = 0
    sums: int = 0
    activations: int = 0
    logits: int = 0
    update: int = 0
    decode: int = 0
    margin: int = 0
    freed: int = 0
    one_sequence: int = 0
    shipped_shape: bool = False
    quantized: bool = False

    @property
    def held(self) -> int:
        """Bytes of arrays that are held between two turns of the compute threads."""
        learning = self.trained + self.optimizer + self.reference + self.rollback + self.published + self.midway
        caches = self.caches + self.prefixes + self.evaluation
        return self.base + learning + self.padded + caches + self.routes + self.adapters

    @property
    def total(self) -> int:
        """Bytes of the run: `held`, the largest turn, and the margin."""
        return self.held + self.turn + self.margin

    @property
    def turn(self) -> int:
        """Bytes of the largest turn: backward pass, sum, optimizer step or decode step, one at a time."""
        return max(self.gradients + self.activations + self.logits, self.sums, self.update, self.decode)

    @property
    def minimum(self) -> int:
        """Minimum bytes of the run: `total` with the KV cache of one sequence, and without adapters of clients."""
        return self.total - self.caches - self.prefixes - self.evaluation - self.adapters + self.one_sequence


class MemoryPart(Struct, frozen=True, kw_only=True):
    """One line of a memory estimate. change: the settings that reduce it, or the reason why there are none."""

    component: str
    bytes: int
    change: str
