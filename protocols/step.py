"""Learner -> broadcaster, checkpointer, monitor: what one consumed batch did to the policy."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from protocols.ledger import LedgerState
from protocols.rollout import Discarded
from protocols.score import ScoredGroup


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A group that entered the update, with the advantage of each completion."""

    scored: ScoredGroup
    advantages: tuple[float, ...]


class UpdateMetrics(Struct, frozen=True, kw_only=True):
    """Numbers of one policy update, natural logs, averaged over completion tokens unless said otherwise.

    kl: to the reference policy, by the chosen estimator; mismatch_kl: k3 of sampler against learner on the tokens that
    the learner's own weights drew (0 where there are none); clip_fraction: share of tokens whose ratio was clipped;
    grad_norm: before clipping; applied: False where the gradient was not finite and the step was skipped.
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


class StepReport(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> monitor; inside `PolicyUpdated`, to everyone else. Sent once per consumed batch.

    step: batches consumed, from 1; version, fingerprint: of the weights after this batch (unchanged if nothing taught).
    trained, discarded: together every group that ended since the last report.
    staleness: per trained group, the learner's version less the group's oldest.
    train_seconds: wall-clock time inside the update; wait_seconds: waiting for groups before it.
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


class PolicyUpdated(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> broadcaster, checkpointer, evaluator, each on an arrow of its own: the whole learner after one batch.

    parameters, optimizer: trees of evaluated arrays, shared with the learner and never written to: a snapshot costs
    nothing. random_state: of the compute thread. ledger: the books after this batch. bad_steps: updates in a row that
    were not finite. train_seconds, trained_tokens: spent in updates, and learnt from, over all lives of the run.
    """

    report: StepReport
    parameters: Any
    optimizer: Any
    random_state: tuple[int, ...]
    ledger: LedgerState
    bad_steps: int
    train_seconds: float
    trained_tokens: int
