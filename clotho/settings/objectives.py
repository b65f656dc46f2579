"""The objectives of the learner: one struct per objective, whose defaults are the values of its paper.

`grpo`, which a profile without an objective has, departs from its paper: its mean and its clip range are DAPO's, as in
the current trainers.

The equations are in `clotho.training.objectives`. A new objective is a struct in the union `Objective` here, and a
function there.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import field

from clotho.settings.bounds import (
    ZERO_IS_OFF,
    Fraction,
    FractionBelowOne,
    ModuleName,
    NonNegativeFloat,
    Off,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Variant,
    ZeroIsOffFloat,
    about,
)

Deviation = Literal["population", "sample"]
GradientNorm = Literal["probabilities", "length", "exact"]
WeightLow = Annotated[Fraction, about("Lower bound of the importance weight.")]
WeightHigh = Annotated[float, about("Upper bound of the importance weight.", ge=1.0)]


class NormalizedAdvantage(Variant, frozen=True, kw_only=True):
    """An advantage that is divided by a standard deviation of rewards."""

    deviation: Annotated[Deviation, about("Standard deviation with divisor n, or n - 1 for a sample.")] = "population"
    epsilon: Annotated[PositiveFloat, about("Constant added to the standard deviation of rewards.")] = 1e-4


class GroupAdvantage(NormalizedAdvantage, frozen=True, kw_only=True, tag="group"):
    """Rewards minus the mean of their group, divided by the standard deviation of their group."""


class MeanAdvantage(Variant, frozen=True, kw_only=True, tag="mean"):
    """Rewards minus the mean of their group."""


class LeaveOneOutAdvantage(Variant, frozen=True, kw_only=True, tag="leave_one_out"):
    """Each reward minus the mean of the other rewards of its group."""


class BatchAdvantage(NormalizedAdvantage, frozen=True, kw_only=True, tag="batch"):
    """Rewards minus the mean of the batch, divided by the standard deviation of the batch."""


class BatchCentredAdvantage(NormalizedAdvantage, frozen=True, kw_only=True, tag="batch_centred"):
    """Rewards minus the mean of their group, divided by the standard deviation over the batch."""


class BatchScaledAdvantage(NormalizedAdvantage, frozen=True, kw_only=True, tag="batch_scaled"):
    """Rewards minus the mean of their group, divided by the standard deviation of the rewards of the batch."""


class MaxRLAdvantage(Variant, frozen=True, kw_only=True, tag="max_rl"):
    """Rewards minus the mean of their group, divided by the mean of their group (arXiv:2602.02710)."""


class OptimalBaselineAdvantage(NormalizedAdvantage, frozen=True, kw_only=True, tag="optimal_baseline"):
    """Rewards minus a baseline of least variance, divided by the standard deviation of their group (VCPO)."""

    gradient_norm: Annotated[
        GradientNorm, about("Gradient norm of a completion: from its probabilities, from its length, or exact.")
    ] = "probabilities"


class BestWorstAdvantage(Variant, frozen=True, kw_only=True, tag="best_worst"):
    """1 for the completion with the highest reward of its group, -1 for that with the lowest, 0 for all others."""


class EnvironmentAdvantage(Variant, frozen=True, kw_only=True, tag="environment"):
    """Advantages per token, which every group must contain."""


Normalized = GroupAdvantage | BatchAdvantage | BatchCentredAdvantage | BatchScaledAdvantage | OptimalBaselineAdvantage
Other = MeanAdvantage | LeaveOneOutAdvantage | MaxRLAdvantage | BestWorstAdvantage | EnvironmentAdvantage
Advantage = Annotated[Normalized | Other, about("How advantages follow from rewards, if groups contain no advantages.")]


class BoundedCorrection(Variant, frozen=True, kw_only=True):
    """A correction by the ratio of the policy at the start of the batch to the rollout policy."""

    low: WeightLow = 0.0
    high: WeightHigh = 2.0


class TruncateSequenceCorrection(BoundedCorrection, frozen=True, kw_only=True, tag="truncate_sequence"):
    """For stale rollouts too: the importance weight of each completion is clipped to its bounds."""


class RejectGeometricCorrection(BoundedCorrection, frozen=True, kw_only=True, tag="reject_geometric"):
    """Small mismatch only: completions are ignored if the geometric mean of their weights is out of bounds."""

    low: WeightLow = 0.99
    high: WeightHigh = 1.01


class TruncateCorrection(BoundedCorrection, frozen=True, kw_only=True, tag="truncate"):
    """Small mismatch only, at a lag of 32 the policy is lost: the weight of each token is clipped (TIS)."""


class MaskCorrection(BoundedCorrection, frozen=True, kw_only=True, tag="mask"):
    """Small mismatch only, at a lag of 32 the policy is lost: tokens out of bounds are ignored (IcePop)."""

    low: WeightLow = 0.5
    high: WeightHigh = 5.0


class RejectSequenceCorrection(BoundedCorrection, frozen=True, kw_only=True, tag="reject_sequence"):
    """Small mismatch only, at a lag of 32 the policy is lost: completions out of bounds are ignored."""


SequenceCorrection = TruncateSequenceCorrection | RejectGeometricCorrection
Correction = Annotated[
    Off | SequenceCorrection | TruncateCorrection | MaskCorrection | RejectSequenceCorrection,
    about("Correction of the mismatch with the rollout policy; stale rollouts: truncate_sequence."),
]


class LinearOverlongPenalty(Variant, frozen=True, kw_only=True, tag="linear"):
    """A penalty that grows linearly over the last tokens before `sampling.max_tokens` (DAPO, section 3.4)."""

    buffer: Annotated[Positive, about("Number of tokens over which the overlong penalty grows.")]
    max_penalty: Annotated[PositiveFloat, about("Penalty at the length sampling.max_tokens.")] = 1.0


OverlongPenalty = Annotated[Off | LinearOverlongPenalty, about("Penalty near sampling.max_tokens.")]
Sums = Literal["token_mean", "sequence_mean", "token_sum", "group_mean", "sum"]
Aggregation = Annotated[Sums, about("Mean of token losses by token, sequence, sampling.max_tokens or group; or sum.")]
Denominator = Literal["sampler", "batch_start", "batch_start_interpolated"]
RatioReference = Annotated[Denominator, about("Denominator of the importance ratio; interpolated: an approximation.")]
ClipLow = Annotated[PositiveFraction, about("Lower end of the clip range: 1 - clip_low (dppo_tv: a probability).")]
ClipHigh = Annotated[PositiveFloat, about("Upper end of the clip range: 1 + clip_high (dppo_tv: a probability).")]
MaxRatio = Annotated[ZeroIsOffFloat, about("Most groups per update, in batches; 0 disables dynamic sampling.")]


class ObjectiveSettings(Variant, frozen=True, kw_only=True):
    """The settings that every objective has.

    has_ratio: whether the loss compares the policy with the sampler; demonstrations, for example, nobody has sampled.
    """

    has_ratio: ClassVar[bool] = True

    advantage: Advantage = GroupAdvantage()
    loss_aggregation: Aggregation = "token_mean"
    overlong_penalty: OverlongPenalty = Off()
    mask_truncated: Annotated[bool, about("Ignore completions that were truncated.")] = False
    dynamic_sampling_max_ratio: MaxRatio = 0.0
    outlier_low: Annotated[
        FractionBelowOne, about("Lowest learner-to-sampler ratio of completions; 0: none.", extra=ZERO_IS_OFF)
    ] = 0.0
    outlier_high: Annotated[ZeroIsOffFloat, about("Highest learner-to-sampler ratio of completions; 0: none.")] = 0.0
    off_policy_mask: Annotated[
        ZeroIsOffFloat, about("Limit in nats of mean log(sampler / learner) for negative advantages; 0: none.")
    ] = 0.0


class RatioObjective(ObjectiveSettings, frozen=True, kw_only=True):
    """An objective with a choice of what its importance ratio is measured against."""

    ratio_reference: RatioReference = "sampler"
    importance_correction: Correction = Off()


class ClippedObjective(RatioObjective, frozen=True, kw_only=True):
    """An objective with the clipped surrogate of PPO."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: Annotated[ZeroIsOffFloat, about("Limit of the loss, x |A|, at a negative advantage A; 0: none.")] = 0.0


class SequenceObjective(ClippedObjective, frozen=True, kw_only=True):
    """An objective with one ratio per completion, in which the rounding of all tokens adds up."""

    ratio_reference: RatioReference = "batch_start"
    importance_correction: Correction = TruncateCorrection()


class Grpo(ClippedObjective, frozen=True, kw_only=True, tag="grpo"):
    """Group Relative Policy Optimization (arXiv:2402.03300) with the mean over tokens and the clip range of DAPO.

    Rewards are centered and scaled by their group: equation 3. Departures: the paper has the mean over completions of
    the mean over tokens, a clip range of 0.2, and a KL penalty (k3, 0.04), which is off here by default; an epsilon is
    added to the standard deviation.
    """

    clip_high: ClipHigh = 0.28


class DrGrpo(ClippedObjective, frozen=True, kw_only=True, tag="dr_grpo"):
    """GRPO without division by the standard deviation and by the length (arXiv:2503.20783).

    Easy and hard prompts have equal weight. Token losses are summed and divided by a constant (`sampling.max_tokens`),
    so that long wrong answers are not discounted.
    """

    advantage: Advantage = MeanAdvantage()
    loss_aggregation: Aggregation = "token_sum"


class Bnpo(ClippedObjective, frozen=True, kw_only=True, tag="bnpo"):
    """GRPO normalized by the tokens of the batch (TRL's loss type bnpo).

    Departure: TRL divides by the tokens of the local micro-batch, which makes the loss depend on the split; here it is
    the whole batch. It is not the Beta normalization of rewards of the paper with the same initials.
    """


class Dapo(ClippedObjective, frozen=True, kw_only=True, tag="dapo"):
    """Decoupled clip and dynamic sampling (arXiv:2503.14476).

    Clip-higher (section 3.1: 0.2 and 0.28), dynamic sampling (3.2), the mean over all tokens of the batch (3.3), no KL
    penalty. The soft overlong punishment (3.4) depends on the length of completions: set `overlong_penalty` (the
    paper's buffer is a fifth of the longest length).
    """

    clip_high: ClipHigh = 0.28
    dynamic_sampling_max_ratio: MaxRatio = 4.0


class Gspo(SequenceObjective, frozen=True, kw_only=True, tag="gspo"):
    """Group Sequence Policy Optimization: one ratio per completion (arXiv:2507.18071)."""

    loss_aggregation: Aggregation = "sequence_mean"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class GspoToken(SequenceObjective, frozen=True, kw_only=True, tag="gspo_token"):
    """GSPO for advantages that differ from token to token (arXiv:2507.18071)."""

    loss_aggregation: Aggregation = "sequence_mean"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class Cispo(RatioObjective, frozen=True, kw_only=True, tag="cispo"):
    """Policy gradient with a clipped importance weight (arXiv:2506.13585)."""

    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0


class Rloo(SequenceObjective, frozen=True, kw_only=True, tag="rloo"):
    """REINFORCE leave-one-out with one ratio per completion (arXiv:2402.14740)."""

    loss_aggregation: Aggregation = "sequence_mean"
    advantage: Advantage = LeaveOneOutAdvantage()


class Reinforce(RatioObjective, frozen=True, kw_only=True, tag="reinforce"):
    """The policy gradient without a clip range (Williams, 1992)."""

    advantage: Advantage = MeanAdvantage()
    ratio_reference: RatioReference = "batch_start"
    importance_correction: Correction = TruncateCorrection()


class ReinforcePlusPlus(ClippedObjective, frozen=True, kw_only=True, tag="reinforce_plus_plus"):
    """REINFORCE++ with advantages normalized over the batch (arXiv:2501.03262).

    The form with baseline: rewards centered by their group, divided by the standard deviation over the batch. The
    paper's plain form, one completion per prompt, is the advantage `batch`. The paper's KL penalty is k1 in the reward
    in the plain form and k2 in the loss with baseline; it is off by default.
    """

    advantage: Advantage = BatchCentredAdvantage()


class PpoDecoupled(ClippedObjective, frozen=True, kw_only=True, tag="ppo_decoupled"):
    """PPO with a clip range around the batch-start policy and an importance weight for staleness (arXiv:2505.24298).

    L_t = -w_t min(u_t A_t, clip(u_t) A_t), u = pi / pi_prox, w = pi_prox / mu: AReaL after Hilton et al.
    (arXiv:2110.00641), with w bounded as in AReaL's code: tokens with w > 5 are masked. With one optimizer step per
    batch, u = 1 and nothing is clipped. Departures: advantages of the group instead of advantages whitened over the
    batch; no critic.
    """

    ratio_reference: RatioReference = "batch_start"
    importance_correction: Correction = MaskCorrection(low=0.0, high=5.0)


class DppoTv(ObjectiveSettings, frozen=True, kw_only=True, tag="dppo_tv"):
    """Divergence PPO: a trust region in probabilities instead of ratios (arXiv:2602.04879)."""

    advantage: Advantage = MeanAdvantage()
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    quadratic_kl: Annotated[NonNegativeFloat, about("Coefficient of the squared log-ratio.")] = 1e-3


class Sapo(RatioObjective, frozen=True, kw_only=True, tag="sapo"):
    """Soft Adaptive Policy Optimization: a sigmoid instead of a clip range (arXiv:2511.20347)."""

    loss_aggregation: Aggregation = "sequence_mean"
    sapo_tau_pos: Annotated[PositiveFloat, about("Sigmoid temperature for positive advantages.")] = 1.0
    sapo_tau_neg: Annotated[PositiveFloat, about("Sigmoid temperature for other advantages.")] = 1.05


class Sft(ObjectiveSettings, frozen=True, kw_only=True, tag="sft"):
    """Supervised fine-tuning: the cross-entropy of demonstrations, which come in the place of completions."""

    has_ratio: ClassVar[bool] = False

    advantage: Advantage = EnvironmentAdvantage()


Beta = Annotated[PositiveFloat, about("Factor of the log-ratios: a larger one keeps the policy nearer its reference.")]


class PreferenceObjective(ObjectiveSettings, frozen=True, kw_only=True):
    """An objective of completions that are better or worse: the sign of their advantage says which.

    The pairs of a dataset come in the place of completions; of sampled groups, it learns the best and the worst.
    in_pairs: whether the loss compares the completions of a group, of which it then has one of each sign.
    """

    has_ratio: ClassVar[bool] = False
    in_pairs: ClassVar[bool] = True

    advantage: Advantage = BestWorstAdvantage()
    loss_aggregation: Aggregation = "sequence_mean"


class ReferencedPreference(PreferenceObjective, frozen=True, kw_only=True):
    """A preference objective with a reference policy."""

    beta: Beta = 0.1
    reference: Annotated[
        Literal["snapshot", "base"],
        about("Reference policy: snapshot is that at the start of the run or stage."),
    ] = "snapshot"


class Dpo(ReferencedPreference, frozen=True, kw_only=True, tag="dpo"):
    """Direct Preference Optimization (arXiv:2305.18290)."""

    label_smoothing: Annotated[
        float, about("Probability that the labels of a pair are exchanged (cDPO).", ge=0.0, le=0.5)
    ] = 0.0
    nll_weight: Annotated[NonNegativeFloat, about("Weight of the cross-entropy of the better completion (RPO).")] = 0.0


class Ipo(ReferencedPreference, frozen=True, kw_only=True, tag="ipo"):
    """Identity Preference Optimization: a squared loss with a target margin of 1 / (2 beta) (arXiv:2310.12036)."""


class Kto(ReferencedPreference, frozen=True, kw_only=True, tag="kto"):
    """Kahneman-Tversky Optimization: completions with a label, without pairs (arXiv:2402.01306)."""

    in_pairs: ClassVar[bool] = False

    desirable_weight: Annotated[NonNegativeFloat, about("Weight of completions that are better.")] = 1.0
    undesirable_weight: Annotated[NonNegativeFloat, about("Weight of completions that are worse.")] = 1.0


class Orpo(PreferenceObjective, frozen=True, kw_only=True, tag="orpo"):
    """Odds Ratio Preference Optimization: no reference policy (arXiv:2403.07691)."""

    odds_weight: Annotated[PositiveFloat, about("Weight of the odds ratio beside the cross-entropy.")] = 0.1


class Simpo(PreferenceObjective, frozen=True, kw_only=True, tag="simpo"):
    """Simple Preference Optimization: mean log-probabilities and a margin, no reference policy (arXiv:2405.14734)."""

    beta: Annotated[PositiveFloat, about("Factor of the mean log-probabilities.")] = 2.0
    target_margin: Annotated[NonNegativeFloat, about("Margin between the rewards of a pair.")] = 1.0


class Custom(ClippedObjective, frozen=True, kw_only=True, tag="custom"):
    """A function of your own, `objective(logp_N, tokens, settings) -> PolicyLoss`."""

    function: Annotated[ModuleName, about("Objective as module:function.", title="module:function")]
    options: Annotated[dict[str, Any], about("Settings that the function reads as settings.options.")] = field(
        default_factory=dict
    )


PaperObjective = Grpo | DrGrpo | Bnpo | Dapo | Gspo | GspoToken | Cispo | Rloo | Reinforce | ReinforcePlusPlus
Preference = Dpo | Ipo | Kto | Orpo | Simpo
Objective = PaperObjective | PpoDecoupled | DppoTv | Sapo | Sft | Preference | Custom
