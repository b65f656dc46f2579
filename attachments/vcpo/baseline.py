"""Advantages over the baseline of least variance: OPOB of VCPO (arXiv:2602.17616).

The baseline is that of the policy at the start of an update, for every optimizer step of the update.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from clotho.models.parameters import Parameters
from clotho.scoring.sequences import MicroBatch
from clotho.settings.bounds import Off
from clotho.settings.objectives import GradientNorm, OptimalBaselineAdvantage, Reinforce
from clotho.training.advantages import Array, OfRewards, centred, spread
from clotho.training.batch import (
    Minibatch,
    PerTokenAdvantages,
    Scores,
    UpdateStart,
    Weights,
    of_completions,
    with_scores,
)
from clotho.training.gradient import FixedLogprobs, LearnerModel, LossConfig, StepPosition
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizers import global_norm
from protocols.rollout import ScoredGroup


def of_update(
    start: UpdateStart, minis: Sequence[Minibatch], preliminary: PerTokenAdvantages, scores: Scores
) -> OfRewards:
    """Return the advantages of an update; arguments are those of `clotho.training.advantages.ATTACHED`."""
    settings = start.loss_config.settings
    advantage = settings.objective.advantage
    assert isinstance(advantage, OptimalBaselineAdvantage)
    log_weights = log_variance_weights(start.groups, minis, scores, gradient_norm=advantage.gradient_norm)
    if advantage.gradient_norm == "exact":
        singly = replace(settings, micro_batch_tokens=1, num_minibatches=1)
        alone = start.division._replace(settings=singly, layout="padded", least=1)
        log_norms = _exact_norms(start, alone.minibatches(start.groups, preliminary))
        log_weights = [weight_G + norm_G for weight_G, norm_G in zip(log_weights, log_norms, strict=True)]

    def of_rewards(groups: Sequence[int], rewards: list[Array]) -> list[Array]:
        return [optimal_baseline(advantage, one_G, log_weights[g]) for g, one_G in zip(groups, rewards, strict=True)]

    return of_rewards


def optimal_baseline(settings: OptimalBaselineAdvantage, reward_G: Array, log_weight_G: Array) -> Array:
    """A_i = (r_i - b) / (std r + epsilon), b = sum_j W_j r_j / sum_j W_j, of one group.

    With W_j = w_j^2 |grad log pi(y_j)|^2, where w_j = pi(y_j) / mu(y_j) is the importance weight of completion j, the
    estimate sum_j w_j (r_j - b) grad log pi(y_j) of the policy gradient has the least variance among all baselines of
    the group. The division by the standard deviation is the `norm_by_std` of the authors' scripts.

    log_weight_G: log W_j; minus infinity for a completion without a gradient. A group without any gradient, or with
    equal W_j, has the mean of its rewards as baseline. Advantages are not finite if a log W_j is NaN.
    """
    if not centred(reward_G).any():
        return np.zeros_like(reward_G)
    highest = log_weight_G.max()
    weight_G = np.ones_like(reward_G) if highest == -np.inf else np.exp(log_weight_G - highest)
    baseline = float((weight_G * reward_G).sum() / weight_G.sum())
    return (reward_G - baseline) / (spread(reward_G, int(settings.deviation == "sample")) + settings.epsilon)


def log_variance_weights(
    groups: Sequence[ScoredGroup], minis: Sequence[Minibatch], scores: Scores, *, gradient_norm: GradientNorm
) -> Weights:
    """Return log(w^2 n) of every completion for the baseline of least variance: (G,) float64 per group, in nats.

    w = exp(sum_t log pi_t - log mu_t) is the importance weight of the completion. n estimates |grad log pi|^2, as if
    the gradients of tokens were orthogonal. "probabilities": n = sum_t (1 - pi_t)^2, with which the squared norm of the
    gradient with respect to the logits of a token, (1 - pi_t)^2 + sum_{v != t} pi_v^2, agrees up to a factor of 2.
    "length": n is the number of tokens (OPO, arXiv:2505.23585). "exact": n = 1; the caller adds the exact norm.
    Minus infinity for completions that are not trained on.

    scores: log-probabilities under the policy at the start of the update.
    """

    def log_weight_B(micro: MicroBatch, logp_N: mx.array) -> NDArray[np.float64]:
        pi_N = np.array(logp_N, dtype=np.float64)
        norm_N = np.square(np.expm1(pi_N)) if gradient_norm == "probabilities" else np.ones_like(pi_N)
        norm_B = np.ones(micro.sequences) if gradient_norm == "exact" else micro.sum_B(norm_N)
        with np.errstate(divide="ignore"):
            return 2.0 * micro.log_weight_B(pi_N) + np.log(norm_B)

    values = (log_weight_B(micro, logp_N) for micro, logp_N in with_scores(minis, scores))
    return of_completions(groups, minis, values, others=-np.inf)


def _exact_norms(start: UpdateStart, minis: Sequence[Minibatch]) -> Weights:
    """Return log |grad log pi|^2 of every completion. minis: of micro-batches of one completion."""
    model = start.model

    def log_norm_B(micro: MicroBatch) -> NDArray[np.float64]:
        norm = score_norm_squared(model, start.parameters, micro, start.loss_config)
        model.turns.pause()
        with np.errstate(divide="ignore"):
            return np.log([norm])

    return of_completions(start.groups, minis, (log_norm_B(micro) for mini in minis for micro in mini.micro_batches))


def score_norm_squared(
    model: LearnerModel, parameters: Parameters, micro: MicroBatch, loss_config: LossConfig
) -> float:
    """Return |grad sum_t log pi_t|^2 over the tokens of a micro-batch, with respect to the trainable parameters."""
    plain = replace(loss_config.settings, objective=Reinforce(importance_correction=Off()), kl_penalty=Off())
    table = micro.table._replace(loss_weight_N=micro.table.loss_mask_N, teacher=None, teacher_logp_N=None)
    gradient = model.gradient(
        parameters,
        micro._replace(table=table),
        FixedLogprobs(),
        loss_config=LossConfig(plain, _log_probability, LossCoefficients(0.0, 0.0)),
        position=StepPosition(0, 0.0),
    )
    return float(np.array(global_norm(gradient.arrays))) ** 2


def _log_probability(logp_N: mx.array, tokens: ObjectiveInputs, settings: Reinforce) -> PolicyLoss:
    return PolicyLoss(logp_N, mx.zeros_like(logp_N))
