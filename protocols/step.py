"""Learner -> broadcaster, checkpointer, evaluator and monitor: the results of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Any

from msgspec import Struct

from protocols import about
from protocols.accounting import LedgerState
from protocols.checkpoint import Part
from protocols.finding import Finding
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup


class Cut(IntEnum):
    """What limits the gradient of a token in an update. If several apply: a mask, a rejection, a clip, a truncation.

    NONE: nothing.
    CLIP: the objective clips the token. Clipped surrogates give it no gradient; `cispo` bounds its weight.
    CORRECTION: an importance correction rejects the token or truncates its weight.
    MASK: a mask excludes the token: tokens that the policy did not sample, truncated completions, completions of which
        the environment sets the advantage to 0, outliers and the off-policy mask.
    NOT_TRAINED: the group was discarded.
    """

    NONE = 0
    CLIP = 1
    CORRECTION = 2
    MASK = 3
    NOT_TRAINED = 4


class TokenValues(Struct, frozen=True, kw_only=True):
    """What an update computed for each token of one completion: arrays as bytes, one little-endian number per token.

    learner_logprob: float32, nats; at the first gradient of the update that used the token, NaN without any.
    advantage: float32. cut: uint8, a value of `Cut`.
    gradient_share: float32. |d loss / d logp| at that first gradient, divided by its sum over the tokens of the update.
    """

    learner_logprob: bytes
    advantage: bytes
    cut: bytes
    gradient_share: bytes


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A group that was trained on. advantages: one per completion.

    tokens: one entry per completion; empty if per-token values are off (`monitor.token_values_mb`).
    """

    scored: ScoredGroup
    advantages: tuple[float, ...]
    tokens: tuple[TokenValues, ...] = ()


class UpdateMetrics(Struct, frozen=True, kw_only=True):
    """Metrics of one policy update, as metrics.jsonl has them. The importance ratio is learner / sampler.

    A new metric that is a mean over tokens needs its field here and its value in `training.objectives.loss`.
    """

    loss: Annotated[float, about("Loss of the update, averaged over its optimizer steps.")]
    kl: Annotated[
        float,
        about("KL divergence between policy and reference policy, in nats per token; null without a KL penalty."),
    ]
    entropy: Annotated[float, about("Entropy of the policy, in nats per token.")]
    clip_fraction: Annotated[float, about("Fraction of tokens whose importance ratio was clipped.")]
    mismatch_kl: Annotated[
        float,
        about(
            "KL divergence between sampler and learner on tokens that the current policy version "
            "sampled; about 1e-10 from rounding; null without such tokens."
        ),
    ]
    ratio_mean: Annotated[float, about("Mean importance ratio.")]
    grad_norm: Annotated[float, about("Norm of the gradient of the last optimizer step, before clipping.")]
    learning_rate: Annotated[float, about("Learning rate of the update, before the factor `step_scale`.")]
    trained_tokens: Annotated[int, about("Number of tokens that the update trained on, replayed tokens included.")]
    update_applied: Annotated[bool, about("Whether the update changed the weights.")]
    ess: Annotated[
        float,
        about("Effective sample size of the importance weights learner / sampler, as a fraction of the tokens."),
    ]
    rejected_fraction: Annotated[float, about("Fraction of tokens that an importance correction or a mask excluded.")]
    kl_beta: Annotated[float, about("Coefficient of the KL penalty in this update.")]
    entropy_coef: Annotated[float, about("Coefficient of the entropy bonus in this update.")]
    optimizer_steps: Annotated[
        int, about("Number of optimizer steps of the update, steps with a zero gradient excluded.")
    ]
    update_kl: Annotated[
        float | None,
        about(
            "KL divergence between the policy before and after the update, in nats per token, on a "
            "sample of its completions."
        ),
    ] = None
    completion_ess: Annotated[
        float,
        about(
            "Effective sample size of the importance weights of whole completions, as a fraction of the "
            "completions, averaged over the optimizer steps."
        ),
    ] = 1.0
    clip_fraction_low: Annotated[
        float, about("Fraction of tokens that were clipped at a negative advantage (`clip_low`).")
    ] = 0.0
    clip_fraction_high: Annotated[
        float, about("Fraction of tokens that were clipped at a positive advantage (`clip_high`).")
    ] = 0.0
    step_scale: Annotated[
        float,
        about(
            "Factor of the learning rate that `learner.step_scale` gives, averaged over the optimizer "
            "steps; 1 without it."
        ),
    ] = 1.0
    unmoved_cut_fraction: Annotated[
        float,
        about(
            "Fraction of the tokens that the policy before the update sampled whose gradient a clip range "
            "or an importance correction limits before the policy moves, because of rounding; null without such tokens."
        ),
    ] = 0.0
    distillation_loss: Annotated[
        float,
        about(
            "Mean cross-entropy with the alternatives of the teacher, in nats, over tokens that have any; "
            "null without a teacher."
        ),
    ] = 0.0
    perplexity: Annotated[
        float | None,
        about(
            "Perplexity of the demonstrations: exp of the mean cross-entropy of their learned tokens; null "
            "without demonstrations."
        ),
    ] = None
    preference_accuracy: Annotated[
        float | None,
        about(
            "Fraction of pairs whose better completion has the higher implicit reward (`kto`: of "
            "completions on the right side of the reference point); null without an objective of preferences."
        ),
    ] = None
    preference_margin: Annotated[
        float | None,
        about(
            "Mean difference of the implicit rewards of better and worse completions (`kto`: distance from "
            "the reference point in the right direction); null without an objective of preferences."
        ),
    ] = None
    better_log_ratio: Annotated[
        float | None,
        about(
            "Mean log-ratio of policy and reference policy, in nats, of better completions (`ipo`: per "
            "token); null without an objective with a reference policy."
        ),
    ] = None
    worse_log_ratio: Annotated[
        float | None,
        about("Mean log-ratio of policy and reference policy of worse completions, as `better_log_ratio`."),
    ] = None
    expert_share_max: Annotated[
        float | None,
        about("Share of the trained tokens that the most used expert of any layer computes; null without experts."),
    ] = None
    expert_share_min: Annotated[
        float | None,
        about("Share of the trained tokens that the least used expert computes; null without experts."),
    ] = None
    unused_experts_fraction: Annotated[
        float | None,
        about("Fraction of the experts of all layers that compute no trained token; null without experts."),
    ] = None
    flipped_routes: Annotated[
        float | None,
        about(
            "Experts that the learner's routers choose for trained tokens and the sampler's did not, per "
            "layer and 1,000 tokens; null if the sampler has recorded none."
        ),
    ] = None
    replayed_routes: Annotated[
        bool, about("Whether the update took the routes of the sampler (`learner.router_replay`).")
    ] = False


class StepReport(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> monitor, and inside `PolicyUpdated`. One per consumed batch.

    step: number of batches consumed, this one included.
    version, fingerprint: of the weights after the batch.
    trained, discarded: every group that ended since the last report.
    staleness: per trained group, the learner's version minus the group's oldest version.
    update: None if the batch had no group to train on.
    train_seconds: wall-clock time of the update. longest_turn_seconds: longest time that the update kept the compute
    thread from decoding. wait_seconds: time spent waiting for groups before it.
    replaced: number of groups that were replaced by another group (`learner.objective.dynamic_sampling_max_ratio`).
    replayed: number of groups that were trained on beside those of the batch.
    collapse_findings: of the hooks that assess the batch.
    rolled_back: the weights are those of an earlier version.
    metrics: values of hooks for metrics.jsonl, by name.
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
    longest_turn_seconds: float = 0.0
    replaced: int = 0
    replayed: int = 0
    collapse_findings: tuple[Finding, ...] = ()
    rolled_back: bool = False
    metrics: Mapping[str, Any] = {}

    @property
    def ended(self) -> tuple[GroupOutcome, ...]:
        """Every group that ended, those that were trained on first."""
        return (*(group.scored for group in self.trained), *self.discarded)


class GroupsEnded(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> monitor. Groups discarded between two batches.

    step: number of the batch that is being collected. Its `StepReport` does not list these groups again.
    """

    step: int
    discarded: tuple[Discarded, ...]

    @property
    def ended(self) -> tuple[GroupOutcome, ...]:
        """Every group that ended."""
        return self.discarded


class FirstBatch(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> monitor, once per start and before the first update: the groups that ended first, as many as a batch.

    The monitor checks these groups before the policy changes. The groups are reported again when they are recorded.
    step: number of their batch.
    """

    step: int
    groups: tuple[GroupOutcome, ...]


LearnerReport = StepReport | GroupsEnded | FirstBatch
"""What the learner sends to the monitor."""


class PolicyUpdated(Struct, frozen=True, kw_only=True, tag=True):
    """Learner -> broadcaster, checkpointer, evaluator, each through its own queue. The learner's state after a batch.

    parameters, optimizer: trees of evaluated arrays, shared with the learner. Arrays are immutable, so that no copy is
        needed.
    random_state: state of the learner's random number generator.
    bad_steps: consecutive updates that were not finite.
    train_seconds, trained_tokens: totals since the run began.
    parts: what attachments keep in the checkpoint of this batch, by the names of their folders.
    """

    report: StepReport
    parameters: Any
    optimizer: Any
    random_state: tuple[int, ...]
    ledger: LedgerState
    bad_steps: int
    train_seconds: float
    trained_tokens: int
    parts: Mapping[str, Part[object]] = {}


class WeightsReady(Struct, frozen=True, kw_only=True, tag=True):
    """Broadcaster -> generator, atropos_fetcher and server. The weights that are being served.

    version: policy version, the number of updates since the run began; 0 is the initial policy.
    step: number of batches consumed. A batch without an update increments `step`, but not `version`.
    fingerprint: hash of the trainable weights.
    """

    version: int
    step: int
    fingerprint: str
