"""Objectives whose importance ratio is that of the whole completion. The departures in `token_level` apply.

The rounding of all tokens adds up in such a ratio. By default it is therefore against the policy at the start of the
batch, and each token has an importance correction for the mismatch with the sampler (TIS). With one optimizer step per
batch the ratio is exactly 1: the log-probabilities of the gradient's own pass, without another forward pass.

Use these objectives with `loss_aggregation = "sequence_mean"`: each token then carries its share of one loss per
completion.
"""

from __future__ import annotations

import mlx.core as mx

from clotho.settings.objectives import Gspo, GspoToken, ObjectiveSettings, Rloo, SequenceObjective
from clotho.training.objectives.contract import Objective, ObjectiveInputs, PolicyLoss
from clotho.training.objectives.kl import MAX_LOG_RATIO
from clotho.training.objectives.token_level import clipped
from protocols.errors import ProfileError

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


OBJECTIVES: dict[type[ObjectiveSettings], Objective] = {Gspo: gspo, GspoToken: gspo_token, Rloo: rloo}
"""The objective function of each struct."""
