"""The section of a profile that says how the policy learns: objective, corrections, penalties, optimizer, batches.

A section's docstring has one line per key (`key: text`, or `key, key: text`); `--help` and `docs/configuration.md`
are generated from them. The sections of what stands beside the learner, replay and alarms, are here too.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from clotho.config.bounds import NonNegative, NonNegativeFloat, Positive, PositiveFloat

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]


class ObjectiveKeys(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is maximised.

    objective: grpo, dr_grpo, bnpo, dapo, gspo, gspo_token, cispo, rloo, reinforce, reinforce_plus_plus, ppo_decoupled,
        dppo_tv, sapo; or `module:function`. A name brings its recipe along: its paper's settings of the keys below.
    advantage: what rewards say of a completion: `group` (centred and scaled by its group), `mean` (centred),
        `leave_one_out`, `batch` (whitened over the batch), `batch_centred` (centred by its group, scaled by the batch),
        `environment` (per token, as every group brings them). Groups that bring them are judged so in any case.
    advantage_deviation: by which standard deviations are taken.
    advantage_epsilon: added to the deviation.
    loss_aggregation: how token losses become one: `token_mean` over the whole batch, `sequence_mean` of token means,
        `token_sum` over `sampling.max_tokens` a sequence, `group_mean` of the token means of groups.
    clip_low, clip_high: beyond [1 - clip_low, 1 + clip_high] the ratio gains nothing more; for dppo_tv of the
        difference of probabilities.
    dual_clip: where the advantage is negative, the loss of a token is at most so many times its size; 0 = off.
    quadratic_kl: dppo_tv's weight of the squared log-ratio.
    sapo_tau_pos, sapo_tau_neg: sapo's temperatures for positive and other advantages.
    overlong_buffer: over so many last tokens before `sampling.max_tokens` a growing penalty is taken from the reward;
        0 = none.
    overlong_penalty: that penalty at its largest.
    mask_truncated: learn nothing from completions that reached `sampling.max_tokens`.
    dynamic_sampling: replace groups that cannot be learned from, so that every batch has `batch_size` that can.
    dynamic_limit: at most so many times `batch_size` groups are asked for one batch.
    """

    objective: Annotated[str, Meta(pattern=r"^[\w.]+(:\w+)?$", description="name or module:function")] = "grpo"
    advantage: Literal["group", "mean", "leave_one_out", "batch", "batch_centred", "environment"] = "group"
    advantage_deviation: Literal["population", "sample"] = "population"
    advantage_epsilon: PositiveFloat = 1e-4
    loss_aggregation: Literal["token_mean", "sequence_mean", "token_sum", "group_mean"] = "sequence_mean"
    clip_low: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: Annotated[float, Meta(ge=0.0)] = 0.0
    quadratic_kl: NonNegativeFloat = 1e-3
    sapo_tau_pos: PositiveFloat = 1.0
    sapo_tau_neg: PositiveFloat = 1.05
    overlong_buffer: NonNegative = 0
    overlong_penalty: PositiveFloat = 1.0
    mask_truncated: bool = False
    dynamic_sampling: bool = False
    dynamic_limit: Annotated[float, Meta(gt=1.0)] = 4.0


class CorrectionKeys(ObjectiveKeys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the ratio is against, and what is done where sampler and learner disagree.

    ratio_reference: the ratio is against the `sampler`'s log-probabilities, or against `batch_start`: the learner at the
        start of the batch.
    proximal: `recompute` its log-probabilities, or `interpolate` them between sampler and learner by versions (saves a
        pass where a batch takes several optimizer steps).
    correction: of proximal / sampler, by token: `truncate` (TIS), `mask` (IcePop); by sequence: `truncate_sequence`,
        `reject_sequence`, `reject_geometric`. Needs ratio_reference = batch_start: otherwise it would count twice.
    correction_low, correction_high: bounds of that ratio; choosing a correction brings its own along.
    outlier_low, outlier_high: sequences with any token's learner / sampler beyond are left out; 0 = no such bound.
    off_policy_mask: sequences of negative advantage whose mean log(sampler / learner) is larger are left out; 0 = off.
    """

    ratio_reference: Literal["sampler", "batch_start"] = "sampler"
    proximal: Literal["recompute", "interpolate"] = "recompute"
    correction: Literal["none", "truncate", "mask", "truncate_sequence", "reject_sequence", "reject_geometric"] = "none"
    correction_low: NonNegativeFloat = 0.0
    correction_high: PositiveFloat = 2.0
    outlier_low: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    outlier_high: NonNegativeFloat = 0.0
    off_policy_mask: NonNegativeFloat = 0.0


class PenaltyKeys(CorrectionKeys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What keeps the policy near a reference, and alive.

    kl_beta: weight of the penalty towards the reference; 0 = none.
    kl_estimator: of that penalty, per token; `k2` is what others call mse.
    kl_in: put it in the `loss`, or take it from the `reward`.
    kl_unbiased: weigh the estimate by the ratio, so that its gradient is that of the divergence.
    kl_target: adapt kl_beta so that the divergence per token stays near so many nats; 0 = fixed.
    kl_horizon: updates over which it adapts.
    reference: the `base` (adapter off), a `snapshot` of the policy, a moving `average` of it, or the reference of the
        `environment`, whose log-probabilities the groups bring.
    reference_interval: updates after which the snapshot is taken anew; 0 = never.
    ref_ema: share of itself that the moving average keeps with every update.
    entropy_weight: bonus per nat of entropy.
    entropy_decay: factor of entropy_weight with every update.
    entropy_target: entropy_weight rises by entropy_step while the entropy is below so many nats, else falls; 0 = off.
    entropy_step: see entropy_target.
    distillation_weight: of the cross-entropy of a teacher's alternatives, per token, where a group brings a teacher.
    """

    kl_beta: NonNegativeFloat = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_unbiased: bool = False
    kl_target: NonNegativeFloat = 0.0
    kl_horizon: Positive = 100
    reference: Literal["base", "snapshot", "average", "environment"] = "base"
    reference_interval: NonNegative = 0
    ref_ema: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.99
    entropy_weight: NonNegativeFloat = 0.0
    entropy_decay: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    entropy_target: NonNegativeFloat = 0.0
    entropy_step: PositiveFloat = 1e-4
    distillation_weight: NonNegativeFloat = 0.0


class OptimizerKeys(PenaltyKeys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a gradient becomes a step.

    optimizer: adamw, adafactor, lion, muon or sgd. Choosing one does not change learning_rate: lion wants a third to a
        tenth of adamw's, sgd far more.
    learning_rate: the highest, after warm-up.
    lora_plus: the adapter's B learns at so many times the rate of A (LoRA+); 1 = the same.
    schedule: after warm-up; `cosine` and `linear` fall towards `min_learning_rate`, reached one step after the last.
    warmup_steps: linear rise from nothing to `learning_rate`.
    min_learning_rate: where `cosine` and `linear` end, one step after the last.
    beta1, beta2: decay of the averages of gradient and squared gradient (adamw, and muon for what is no hidden matrix);
        lion steps by the first and averages by the second.
    epsilon: added to the root of the averaged square (adamw, and muon for what is no hidden matrix).
    momentum: of sgd and muon.
    weight_decay: decoupled, of every optimizer.
    max_grad_norm: global clipping; 0 = off.
    """

    optimizer: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    learning_rate: PositiveFloat = 1e-5
    lora_plus: Annotated[float, Meta(ge=1.0)] = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: NonNegative = 0
    min_learning_rate: NonNegativeFloat = 0.0
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    epsilon: PositiveFloat = 1e-8
    momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0


class LearnerSection(OptimizerKeys, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[learner] The policy update.

    batch_size: prompts per update.
    update_epochs: passes over each batch.
    num_minibatches: optimizer steps per pass.
    micro_batch_tokens: padded tokens per gradient pass; any split, same gradient.
    layout: how sequences lie in a micro-batch: `padded` rows; `packed`, several to a row, kept apart by the attention
        mask; `shared`, the prompt of a group computed once; `auto`: whichever of `padded` and `shared` is cheaper for
        the batch, where the model's attention allows.
    max_staleness: groups sampled by weights older than this many versions are discarded.
    max_bad_steps: so many updates in a row that are not finite end the run.
    """

    batch_size: Positive = 16
    update_epochs: Positive = 1
    num_minibatches: Positive = 1
    micro_batch_tokens: Positive = 1024
    layout: Literal["auto", "padded", "packed", "shared"] = "auto"
    max_staleness: NonNegative = 4
    max_bad_steps: Positive = 5


class ReplaySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[replay] A buffer of groups that were learned from, to learn from again.

    capacity: groups kept; 0 = no buffer.
    groups: of them, added to each update.
    sampling: `uniform` at random; `priority`: those of the highest; `weighted`: at random, in proportion to
        priority ** exponent.
    priority: mean size of the `advantage`, or `recency`.
    exponent: of the priority, in weighted sampling.
    max_age: versions after which a group leaves the buffer.
    """

    capacity: NonNegative = 0
    groups: Positive = 4
    sampling: Literal["uniform", "priority", "weighted"] = "uniform"
    priority: Literal["advantage", "recency"] = "advantage"
    exponent: PositiveFloat = 1.0
    max_age: Positive = 16


class CollapseDetectionSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[collapse_detection] Signs that the policy collapses or cheats, and what follows.

    on_collapse: `warn`, `stop` the run, go back to the last good policy (`rollback`), or look at nothing (`off`).
    patience: updates in a row that must look bad; one is enough that moved the policy by five times update_kl_high.
    window: healthy updates whose median says what is normal.
    update_kl_high: nats per token by which one update moves the policy.
    ess_low: effective sample size of the learner / sampler ratios, as a share of the tokens.
    kl_high: nats per token from the reference (only where a penalty has it computed).
    reward_drop: the mean reward lost since its best, as a share of what that was above the worst completion so far.
    entropy_low, entropy_high: entropy as a share of the most, and as a multiple of the least, that was normal.
    length_high: mean completion length as a multiple of the normal of late.
    truncated_high: share of completions cut off at `sampling.max_tokens`, above the least that was normal.
    empty_format_high: share of completions with full marks from the reward `format` and none from any other, above the
        least that was normal, while fewer than before have any.
    rollback_rate: factor of the learning rate after each rollback.
    max_rollbacks: one more ends the run.
    """

    on_collapse: Literal["off", "warn", "stop", "rollback"] = "warn"
    patience: Positive = 2
    window: Positive = 5
    update_kl_high: PositiveFloat = 0.1
    ess_low: Fraction = 0.3
    kl_high: PositiveFloat = 2.0
    reward_drop: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.3
    entropy_low: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.01
    entropy_high: Annotated[float, Meta(gt=1.0)] = 4.0
    length_high: Annotated[float, Meta(gt=1.0)] = 4.0
    truncated_high: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.3
    empty_format_high: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.35
    rollback_rate: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.3
    max_rollbacks: Positive = 3
