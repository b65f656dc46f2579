"""What one batch did to the policy: learner -> broadcaster, checkpointer, evaluator and monitor."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from protocols.accounting import LedgerState
from protocols.collapse import CollapseState
from protocols.rollout import Discarded, ScoredGroup


class ReplayGroup(Struct, frozen=True, kw_only=True):
    """A group in the replay buffer, as a checkpoint keeps it.

    advantage: mean absolute advantage of its completions when it was first trained on.
    version: policy version of that update; the staleness of the group counts from it.
    """

    scored: ScoredGroup
    advantage: float
    version: int


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A group that was trained on. advantages: one per completion."""

    scored: ScoredGroup
    advantages: tuple[float, ...]


class UpdateMetrics(Struct, frozen=True, kw_only=True):
    """Metrics of one policy update, in nats where they are logarithms, averaged over completion tokens by default.

    kl: to the reference policy, by the configured estimator.
    mismatch_kl: k3 estimate between sampler and learner, on tokens that the current policy version sampled; 0 without
        such tokens.
    clip_fraction: fraction of tokens whose importance ratio was clipped.
    grad_norm: norm of the last optimizer step's gradient, before clipping.
    applied: False if the gradient was not finite or exactly zero; no step was taken then.
    ess: effective sample size of the importance weights learner / sampler, as a fraction of the tokens.
    rejected_fraction: fraction of tokens that an importance correction or a mask excluded.
    kl_beta, entropy_weight: coefficients of this update.
    optimizer_steps: steps taken; those with a zero gradient are not counted.
    tokens: number of tokens trained on, replayed tokens included.
    step_kl: k3 estimate between the policy before and after the update, on a sample of its tokens; None if not
        measured.
    distillation: cross-entropy with the teacher's alternatives, per token that has a teacher; 0 without a teacher.
    """

    loss: float
    kl: float
    entropy: float
    clip_fraction: float
    mismatch_kl: float
    ratio_mean: float
    grad_norm: float
    learning_rate: float
    tokens: int
    applied: bool
    ess: float
    rejected_fraction: float
    kl_beta: float
    entropy_weight: float
    optimizer_steps: int
    step_kl: float | None = None
    distillation: float = 0.0


class StepReport(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> monitor, and inside `PolicyUpdated`. One per consumed batch.

    step: number of batches consumed, this one included.
    version, fingerprint: of the weights after the batch.
    trained, discarded: every group that ended since the last report.
    staleness: per trained group, the learner's version minus the group's oldest version.
    update: None if the batch had no group to train on.
    train_seconds: wall-clock time of the update. wait_seconds: time spent waiting for groups before it.
    replaced: number of groups that were replaced by another group (`learner.dynamic_sampling`).
    replayed: number of groups from the replay buffer.
    collapse_warnings: symptoms of collapse that the batch shows, as text.
    rolled_back: the weights are those of an earlier version.
    """

    step: int
    version: int
    fingerprint: str
    trained: tuple[TrainedGroup, ...]
    discarded: tuple[Discarded, ...]
    staleness: tuple[int, ...]
    update: UpdateMetrics | None
    train_seconds: float
    wait_seconds: float
    replaced: int = 0
    replayed: int = 0
    collapse_warnings: tuple[str, ...] = ()
    rolled_back: bool = False


class GroupsEnded(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> monitor. Groups discarded between two batches.

    step: number of the batch that is being collected. Its `StepReport` does not list these groups again.
    """

    step: int
    discarded: tuple[Discarded, ...]


class PolicyUpdated(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> broadcaster, checkpointer, evaluator, each through its own queue. The learner's state after a batch.

    parameters, optimizer: trees of evaluated arrays, shared with the learner. Arrays are immutable, so that no copy is
        needed.
    random_state: state of the compute thread's random number generator.
    bad_steps: consecutive updates that were not finite.
    train_seconds, trained_tokens: totals since the run began.
    replay: groups in the replay buffer, oldest first.
    rollbacks: number of rollbacks since the run began.
    """

    report: StepReport
    parameters: Any
    optimizer: Any
    random_state: tuple[int, ...]
    ledger: LedgerState
    bad_steps: int
    train_seconds: float
    trained_tokens: int
    replay: tuple[ReplayGroup, ...] = ()
    collapse: CollapseState = CollapseState()
    rollbacks: int = 0


class WeightsReady(Struct, frozen=True, kw_only=True, tag=True):
    """Broadcaster -> generator, atropos_fetcher and server. The weights that are being served.

    version: policy version, the number of updates since the run began; 0 is the base policy.
    step: number of batches consumed. A batch without an update increments `step`, but not `version`.
    fingerprint: hash of the trainable weights.
    """

    version: int
    step: int
    fingerprint: str
