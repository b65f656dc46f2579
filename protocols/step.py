"""Learner -> broadcaster, checkpointer, monitor: what one consumed batch did to the policy.

A group in the replay buffer, as a checkpoint keeps it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from protocols.alarms import AlarmState
from protocols.ledger import LedgerState
from protocols.rollout import Discarded
from protocols.score import ScoredGroup


class KeptGroup(Struct, frozen=True, kw_only=True):
    """A group that was learned from, and may be again.

    advantage: mean size of the advantages of its completions, when it was learned from first.
    version: of the weights that this first update made; its age counts from there.
    """

    scored: ScoredGroup
    advantage: float
    version: int


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A group that entered the update, with the advantage of each completion."""

    scored: ScoredGroup
    advantages: tuple[float, ...]


class UpdateMetrics(Struct, frozen=True, kw_only=True):
    """Numbers of one policy update, natural logs, averaged over completion tokens unless said otherwise.

    kl: to the reference policy, by the chosen estimator; mismatch_kl: k3 of sampler against learner on the tokens that
    the learner's own weights drew (0 where there are none); clip_fraction: share of tokens whose ratio was clipped;
    grad_norm: before clipping, of the last optimizer step; applied: False where the gradient was not finite, or exactly
    zero, and no step was taken. ess: effective sample size of the ratios learner / sampler, as a share of the tokens;
    rejected_fraction: share of tokens that a correction or a mask left out. kl_beta, entropy_weight: as they stood in
    this update. optimizer_steps: how many it took, those without a gradient not counted. tokens: learned from, each
    counted once, replayed ones included. step_kl: k3 of the policy before the update against that after it, on some of
    its tokens; None where not measured. distillation: cross-entropy of a teacher's alternatives under the policy, per
    token with a teacher; 0 without one.
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
    """Learner -> monitor; inside `PolicyUpdated`, to everyone else. Sent once per consumed batch.

    step: batches consumed, from 1; version, fingerprint: of the weights after this batch (unchanged if nothing taught).
    trained, discarded: together every group that ended since the last report.
    staleness: per trained group, the learner's version less the group's oldest.
    train_seconds: wall-clock time inside the update; wait_seconds: waiting for groups before it.
    refilled: groups of this batch in whose place another one was asked.
    replayed: groups from the replay buffer that the update learned from again. alarms: signs of collapse that this batch
    showed, in words. rolled_back: the weights of this version are those of an earlier one.
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
    refilled: int = 0
    replayed: int = 0
    alarms: tuple[str, ...] = ()
    rolled_back: bool = False


class GroupsEnded(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> monitor: groups that ended between two batches, for they count towards none.

    step: the number of the batch that was forming. Its `StepReport` does not list them again.
    """

    step: int
    discarded: tuple[Discarded, ...]


class PolicyUpdated(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> broadcaster, checkpointer, evaluator, each on an arrow of its own: the whole learner after one batch.

    parameters, optimizer: trees of evaluated arrays, shared with the learner and never written to: a snapshot costs
    nothing. random_state: of the compute thread. ledger: the books after this batch. bad_steps: updates in a row that
    were not finite. train_seconds, trained_tokens: spent in updates, and learned from, over all lives of the run.
    replay: groups in the replay buffer, the oldest first. alarms: what they remember. rollbacks: over all lives.
    """

    report: StepReport
    parameters: Any
    optimizer: Any
    random_state: tuple[int, ...]
    ledger: LedgerState
    bad_steps: int
    train_seconds: float
    trained_tokens: int
    replay: tuple[KeptGroup, ...] = ()
    alarms: AlarmState = AlarmState()
    rollbacks: int = 0
