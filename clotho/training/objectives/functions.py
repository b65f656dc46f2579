"""The functions of objectives, by their settings: the built-in ones, and `module:function` from the Python path.

Departures from the papers, for all objectives:
1. By default the ratio of a token is against the sampler, which may be some versions old (asynchrony). With
   `ratio_reference = "batch_start"` it is against the policy at the start of the batch (`ppo_decoupled`).
2. Log-ratios are clamped to plus or minus 20 nats; beyond, their gradient is zero.
3. An objective is the loss of tokens. The papers' choices of advantage, aggregation and KL penalty are the defaults of
   the objective's settings (`clotho.settings.objectives`).

The last three have the ratio of the whole completion, in which the rounding of all tokens adds up. By default it is
therefore against the policy at the start of the batch, and each token has an importance correction for the mismatch
with the sampler (TIS). With one optimizer step per batch the ratio is exactly 1: the log-probabilities of the
gradient's own pass, without another forward pass. Use these objectives with `loss_aggregation = "sequence_mean"`: each
token then carries its share of one loss per completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from clotho.extension import TableDoor, provided
from clotho.settings import objectives as settings
from clotho.settings.objectives import (
    Cispo,
    ClippedObjective,
    DppoTv,
    Gspo,
    GspoToken,
    ObjectiveSettings,
    Reinforce,
    Rloo,
    Sapo,
    SequenceObjective,
)
from clotho.training.advantages import attached
from clotho.training.objectives.contract import Objective, ObjectiveInputs, PolicyLoss
from clotho.training.objectives.kl import MAX_LOG_RATIO, bounded_log_ratio
from clotho.user_code import load_named
from protocols.errors import ProfileError


def clipped(ratio_N: mx.array, advantage_N: mx.array, settings: ClippedObjective) -> PolicyLoss:
    """The clipped surrogate: bound the gain of moving away from the old policy. All (N,).

    L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    PPO (arXiv:1707.06347), equation 7, with the two-sided range of DAPO (arXiv:2503.14476), section 3.1. If A < 0 and
    dual_clip = c > 0, L_t = min(L_t, c |A_t|): dual-clip PPO (arXiv:1912.09729), which requires c > 1 and uses 3. A
    token counts as clipped where the loss is flat: A > 0 and r > 1 + clip_high, A < 0 and r < 1 - clip_low, or A < 0
    and r > c. A = 0 gives 0 and is never clipped.
    """
    free_N = ratio_N * advantage_N
    bounded_N = mx.clip(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage_N
    gain_N, clipped_N = mx.minimum(free_N, bounded_N), bounded_N < free_N
    if settings.dual_clip > 0:
        floor_N = mx.where(advantage_N < 0, settings.dual_clip * advantage_N, -mx.inf)
        gain_N, clipped_N = mx.maximum(gain_N, floor_N), clipped_N | (floor_N > gain_N)
    return PolicyLoss(-gain_N, clipped_N)


def clipped_surrogate(logp_N: mx.array, tokens: ObjectiveInputs, settings: ClippedObjective) -> PolicyLoss:
    """`clipped` with the ratio of each token, r_t = pi(t) / pi_old(t): GRPO and its relatives.

    At r = 1 the gradient of the loss is that of -A log pi (REINFORCE). The relatives differ in their settings
    (`clotho.settings.objectives`, with sources and departures).
    """
    return clipped(mx.exp(bounded_log_ratio(logp_N, tokens.old_logp_N)), tokens.advantage_N, settings)


def reinforce(logp_N: mx.array, tokens: ObjectiveInputs, settings: Reinforce) -> PolicyLoss:
    """The policy gradient, L_t = -A_t log pi(t): Williams, "Simple statistical gradient-following algorithms" (1992).

    There is no importance ratio and no clipping. Settings: staleness is corrected by the truncated importance weight
    (TIS) against the policy at the start of the batch. The value of the loss has no meaning; only the gradient does.
    """
    return PolicyLoss(-tokens.advantage_N * logp_N, mx.zeros_like(logp_N))


def cispo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Cispo) -> PolicyLoss:
    """Clipped IS-weight Policy Optimization, MiniMax-M1 (arXiv:2506.13585): clip the weight instead of the gain.

    L_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(t). Tokens that the update moves far keep their
    gradient, with a bounded weight. Settings: no lower bound (clip_low = 1), weights of at most 5 (TRL's advice after
    ScaleRL, arXiv:2510.13786; MiniMax gives no number), the mean over all tokens. clipped_N marks clipped weights;
    these tokens still have a gradient.
    """
    ratio_N = mx.exp(bounded_log_ratio(mx.stop_gradient(logp_N), tokens.old_logp_N))
    weight_N = mx.clip(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return PolicyLoss(-weight_N * tokens.advantage_N * logp_N, weight_N != ratio_N)


def sapo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Sapo) -> PolicyLoss:
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): a sigmoid instead of the clip.

    L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with one tau for A > 0 and one for other advantages. The gradient is
    that of -A r times 4 p (1 - p), p = sigmoid(tau (r - 1)): exactly 1 at r = 1, decreasing on both sides, faster with
    a larger tau; the paper uses 1.05 for negative advantages and 1 for positive ones. The value at r = 1 is -2 A / tau.
    Nothing is clipped.
    """
    ratio_N = mx.exp(bounded_log_ratio(logp_N, tokens.old_logp_N))
    tau_N = mx.where(tokens.advantage_N > 0, settings.sapo_tau_pos, settings.sapo_tau_neg)
    gate_N = 4.0 / tau_N * mx.sigmoid(tau_N * (ratio_N - 1.0))
    return PolicyLoss(-gate_N * tokens.advantage_N, mx.zeros_like(logp_N))


def dppo_tv(logp_N: mx.array, tokens: ObjectiveInputs, settings: DppoTv) -> PolicyLoss:
    """Divergence PPO (arXiv:2602.04879) with the binary total variation: a trust region in probabilities.

    L_t = -k_t A_t r_t + quadratic_kl (log r_t)^2, r_t = pi(t) / mu(t), mu the sampler. k_t = 0 if the token has moved
    far already and would be moved further: A > 0 and pi - mu > clip_high, or A < 0 and pi - mu < -clip_low; else 1. |pi
    - mu| is the total variation between the two policies as far as this token shows it; a ratio would overestimate it
    for rare tokens and underestimate it for likely ones. With clips of 1, never reached, it is plain importance
    sampling. The squared log-ratio also applies to masked tokens; docs/numerics.md says where it is from. The ratio is
    always against the sampler.
    """
    log_ratio_N = bounded_log_ratio(logp_N, tokens.rollout_logp_N)
    moved_N = mx.stop_gradient(mx.exp(logp_N) - mx.exp(tokens.rollout_logp_N))
    rose_N = (tokens.advantage_N > 0) & (moved_N > settings.clip_high)
    fell_N = (tokens.advantage_N < 0) & (moved_N < -settings.clip_low)
    masked_N = rose_N | fell_N
    gain_N = mx.where(masked_N, 0.0, tokens.advantage_N * mx.exp(log_ratio_N))
    return PolicyLoss(settings.quadratic_kl * mx.square(log_ratio_N) - gain_N, masked_N)


MAX_TOKEN_LOG_RATIO = 10.0
"""Upper bound of the log-ratio of `gspo_token` in nats, as in verl."""


def require_exact_ratio(settings: ObjectiveSettings, dtype: str) -> None:
    """Refuse the sampler's log-probabilities in the ratio of a completion if the model computes in 16 bits.

    dtype: of the model's weights. Sampler and learner round differently, by more than the clip range allows a whole
    completion (docs/numerics.md has the shares). Raises ProfileError.
    """
    if isinstance(settings, SequenceObjective) and settings.ratio_reference != "batch_start" and "float16" in dtype:
        raise ProfileError(
            f'learner.objective.ratio_reference = "{settings.ratio_reference}" of '
            f"{settings.__struct_config__.tag} clips completions for their rounding in {dtype}: set "
            'learner.objective.ratio_reference = "batch_start" or model.dtype = "float32"'
        )


def gspo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Gspo) -> PolicyLoss:
    """Group Sequence Policy Optimization (arXiv:2507.18071): clip the ratio of the completion.

    s_i = exp(1/|y_i| sum_t log pi(t) / pi_old(t)), L_t = -min(s_i A_t, clip(s_i) A_t): the geometric mean ratio of the
    completion, clipped as in PPO but within 3e-4 and 4e-4 (section 5.1). Tokens with loss mask 0 are not in the mean.
    Departure: with advantages per token, each token has its own minimum with the common ratio.
    """
    log_ratio_B = tokens.mean_B(logp_N - tokens.old_logp_N)
    return clipped(_ratio(log_ratio_B, tokens), tokens.advantage_N, settings)


def gspo_token(logp_N: mx.array, tokens: ObjectiveInputs, settings: GspoToken) -> PolicyLoss:
    """GSPO-token (arXiv:2507.18071): GSPO for advantages per token.

    s_t = sg(s_i) pi(t) / sg(pi(t)), whose value is the ratio of the completion and whose gradient is that of the token.
    For constant advantages and `sequence_mean`, loss and gradient are those of `gspo`. Departure, from verl: the log-
    ratio is at most 10 nats.
    """
    log_ratio_B = mx.stop_gradient(tokens.mean_B(logp_N - tokens.old_logp_N))
    log_ratio_N = tokens.spread_N(log_ratio_B) + logp_N - mx.stop_gradient(logp_N)
    return clipped(mx.exp(mx.clip(log_ratio_N, -MAX_LOG_RATIO, MAX_TOKEN_LOG_RATIO)), tokens.advantage_N, settings)


def rloo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Rloo) -> PolicyLoss:
    """REINFORCE Leave-One-Out (arXiv:2402.14740): the whole completion is one action.

    r_i = exp(sum_t log pi(t) / pi_old(t)), L_t = -min(r_i A_t, clip(r_i) A_t). At r = 1, for constant advantages, the
    gradient of a completion's loss is that of -A_i log pi(y_i): REINFORCE. Its settings have the leave-one-out
    advantage. docs/numerics.md lists the departures.
    """
    log_ratio_B = tokens.sum_B(logp_N - tokens.old_logp_N)
    return clipped(_ratio(log_ratio_B, tokens), tokens.advantage_N, settings)


def _ratio(log_ratio_B: mx.array, tokens: ObjectiveInputs) -> mx.array:
    return tokens.spread_N(mx.exp(mx.clip(log_ratio_B, -MAX_LOG_RATIO, MAX_LOG_RATIO)))


OBJECTIVES: Mapping[type[ObjectiveSettings], Objective] = {
    settings.Grpo: clipped_surrogate,
    settings.DrGrpo: clipped_surrogate,
    settings.Bnpo: clipped_surrogate,
    settings.Dapo: clipped_surrogate,
    settings.ReinforcePlusPlus: clipped_surrogate,
    settings.PpoDecoupled: clipped_surrogate,
    Reinforce: reinforce,
    Cispo: cispo,
    Sapo: sapo,
    DppoTv: dppo_tv,
    Gspo: gspo,
    GspoToken: gspo_token,
    Rloo: rloo,
    settings.Sft: reinforce,
}
"""The objective function of each struct: objective(log pi, tokens, settings)."""

ATTACHED: TableDoor[str] = TableDoor(
    "library.OBJECTIVES", dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo"), "preference")
)
"""Objective functions of attachments as `module:name`, by the types of their settings."""


def objective(chosen: settings.Objective) -> Objective:
    """Return the objective function of these settings; see `contract` for what a custom function must return.

    Raises ProfileError if a custom function cannot be imported or does not take three arguments, or an attachment of
    the objective or its advantage is not installed. A custom function that returns anything but a PolicyLoss of (N,)
    arrays raises ProfileError when it is called.
    """
    attached(chosen.advantage)  # is installed
    if type(chosen) in OBJECTIVES:
        return OBJECTIVES[type(chosen)]
    if not isinstance(chosen, settings.Custom):
        name = str(chosen.__struct_config__.tag)
        if (place := ATTACHED().get(name)) is None:
            raise ProfileError(f'learner.objective = "{name}" {ATTACHED.absence(name)}')
        function: Objective = provided(place)
        return function
    own = load_named(chosen.function, "learner.objective")
    _require_three_arguments(chosen.function, own)
    return _checked(chosen.function, own)


def _require_three_arguments(name: str, function: Any) -> None:
    if not callable(function):
        raise ProfileError(f"learner.objective {name!r} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise ProfileError(
            f"learner.objective {name!r} cannot be called with (logp_N, tokens, settings): {error}"
        ) from None


def _checked(name: str, function: Objective) -> Objective:
    """Refuse results of another shape, which broadcasting would accept, such as a mean over tokens."""

    def checked(logp_N: mx.array, tokens: ObjectiveInputs, settings: Any) -> PolicyLoss:
        result = function(logp_N, tokens, settings)
        if not isinstance(result, PolicyLoss) or any(
            getattr(part, "shape", None) != logp_N.shape for part in result[:2]
        ):
            raise ProfileError(f"learner.objective {name!r} must return a PolicyLoss of two arrays of {logp_N.shape}")
        return result

    return checked
