"""Objectives of preferences: the better completion of a pair shall become more probable than the worse one.

Each is a loss of whole completions, which all their tokens carry. With `loss_aggregation = "sequence_mean"`, the loss
of an update is then the mean over its pairs (`kto`: over its completions). The sign of a completion's advantage says
whether it is the better or the worse one; pairs are groups of one of each sign, and are in one micro-batch.

B completions, of which y_w is the better and y_l the worse one of a pair. A metric of a pair is counted at y_w.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from clotho.scoring.sequences import TrainingSequence
from clotho.settings.objectives import Dpo, Ipo, Kto, Orpo, Simpo
from clotho.training.batch import (
    Minibatch,
    PerTokenAdvantages,
    UpdateStart,
    scored,
    trained_tokens,
    training_sequence,
)
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss


def dpo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Dpo) -> PolicyLoss:
    """Direct Preference Optimization (arXiv:2305.18290), equation 7: classify pairs by their log-ratios.

    L = -log sigmoid(beta h), h = log pi(y_w) / ref(y_w) - log pi(y_l) / ref(y_l), with sums over the trained tokens.
    label_smoothing = e: L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), the conservative DPO of Mitchell
    ("A note on DPO with noisy preferences", 2023). nll_weight = a adds a times the mean of -log pi over the tokens of
    y_w: RPO (arXiv:2404.19733), equation 1.
    """
    ratio_B = _log_ratio_B(logp_N, tokens)
    margin_B = settings.beta * _difference_B(ratio_B, tokens)
    loss_B = -(1.0 - settings.label_smoothing) * _log_sigmoid(margin_B)
    loss_B = loss_B - settings.label_smoothing * _log_sigmoid(-margin_B)
    if settings.nll_weight > 0:
        loss_B = loss_B + settings.nll_weight * _nll_B(logp_N, tokens)
    return _result(loss_B, tokens, _of_pairs(margin_B, tokens) | _log_ratios(ratio_B, tokens))


def ipo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Ipo) -> PolicyLoss:
    """Identity Preference Optimization (arXiv:2310.12036), equation 17: regress the margin on 1 / (2 beta).

    L = (h - 1 / (2 beta))^2, h as in `dpo`. Departure, from TRL and the authors' advice to it: h is the difference of
    means over tokens, not of sums, so that the target does not depend on lengths.
    """
    ratio_B = tokens.mean_B(logp_N - _reference_N(tokens))
    difference_B = _difference_B(ratio_B, tokens)
    loss_B = mx.square(difference_B - 1.0 / (2.0 * settings.beta))
    return _result(loss_B, tokens, _of_pairs(settings.beta * difference_B, tokens) | _log_ratios(ratio_B, tokens))


def kto(logp_N: mx.array, tokens: ObjectiveInputs, settings: Kto) -> PolicyLoss:
    """Kahneman-Tversky Optimization (arXiv:2402.01306), equation 8: completions with a label, without pairs.

    L = w (1 - sigmoid(s beta (r - z))), r = log pi(y) / ref(y), with s = 1 and the weight w of desirable completions
    for a positive advantage, s = -1 and the other weight for a negative one. z is the reference point: the mean of r
    over completions of other prompts of the batch, and at least 0 (`kto_point`). It has no gradient, and is
    that of the policy at the start of the batch.
    """
    ratio_B, sign_B = _log_ratio_B(logp_N, tokens), _sign_B(tokens)
    margin_B = settings.beta * sign_B * (ratio_B - tokens.reference_point)
    weight_B = mx.where(sign_B > 0, settings.desirable_weight, settings.undesirable_weight)
    means = {
        "preference_accuracy": ((margin_B > 0).astype(mx.float32), mx.ones_like(margin_B)),
        "preference_margin": (margin_B, mx.ones_like(margin_B)),
    }
    return _result(weight_B * mx.sigmoid(-margin_B), tokens, means | _log_ratios(ratio_B, tokens))


def kto_point(start: UpdateStart, advantages: PerTokenAdvantages) -> float:
    """Return max(0, the mean of log pi(y') - log ref(y') over sequences): KTO (arXiv:2402.01306), section 4.1."""
    model, division = start.model, start.division._replace(replays=False)
    micros = division.micro_batches(_of_other_prompts(start, advantages))
    if not micros:
        return 0.0
    mini = Minibatch(micros, 0, ())
    own, others = (scored(model, [mini], one)[0] for one in (start.parameters, start.reference))
    ratios = [
        one.sum_B(np.array(own_N, dtype=np.float64) - np.array(reference_N, dtype=np.float64))
        for one, own_N, reference_N in zip(micros, own, others, strict=True)
    ]
    return max(0.0, float(np.concatenate(ratios).mean()))


def _of_other_prompts(start: UpdateStart, advantages: PerTokenAdvantages) -> list[TrainingSequence]:
    """Return the trained completions behind the prompts of the next group each; none if there is one group."""
    groups, settings, found = start.groups, start.loss_config.settings, list[TrainingSequence]()
    if len(groups) < 2:
        return found
    for g, (group, rows) in enumerate(zip(groups, advantages, strict=True)):
        other = groups[(g + 1) % len(groups)].group.prompt.tokens
        for i, advantage_T in enumerate(rows):
            if trained_tokens(group.group.completions[i], advantage_T, settings):
                sequence = training_sequence(g, group, i, advantage_T, 0.0, settings)
                found.append(sequence._replace(prompt=other, supports=(), teacher=None, route_I_E=None))
    return found


def orpo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Orpo) -> PolicyLoss:
    """Odds Ratio Preference Optimization (arXiv:2403.07691), equation 6: cross-entropy of y_w, and the odds ratio.

    L = -m(y_w) - odds_weight log sigmoid(o(y_w) - o(y_l)), o = m - log(1 - exp(m)), with m(y) the mean of log pi over
    the tokens of y. There is no reference policy.
    """
    mean_B = mx.minimum(tokens.mean_B(logp_N), LARGEST_MEAN)
    difference_B = _difference_B(mean_B - mx.log(-mx.expm1(mean_B)), tokens)
    loss_B = _nll_B(logp_N, tokens) - settings.odds_weight * _log_sigmoid(difference_B)
    return _result(loss_B, tokens, _of_pairs(difference_B, tokens))


LARGEST_MEAN = -1e-6
"""Bound of a mean log-probability in nats: the odds of a completion that is certain are not finite."""


def simpo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Simpo) -> PolicyLoss:
    """Simple Preference Optimization (arXiv:2405.14734), equation 6: the reward is the mean log-probability.

    L = -log sigmoid(beta (m(y_w) - m(y_l)) - target_margin), with m(y) the mean of log pi over the tokens of y.
    """
    margin_B = settings.beta * _difference_B(tokens.mean_B(logp_N), tokens)
    return _result(-_log_sigmoid(margin_B - settings.target_margin), tokens, _of_pairs(margin_B, tokens))


Means = dict[str, tuple[mx.array, mx.array]]


def _result(loss_B: mx.array, tokens: ObjectiveInputs, means: Means) -> PolicyLoss:
    loss_N = tokens.spread_N(loss_B)
    return PolicyLoss(loss_N, mx.zeros_like(loss_N), means)


def _of_pairs(margin_B: mx.array, tokens: ObjectiveInputs) -> Means:
    better_B = (_sign_B(tokens) > 0).astype(mx.float32)
    return {
        "preference_accuracy": ((margin_B > 0).astype(mx.float32), better_B),
        "preference_margin": (margin_B, better_B),
    }


def _log_ratios(ratio_B: mx.array, tokens: ObjectiveInputs) -> Means:
    sign_B = _sign_B(tokens)
    return {
        "better_log_ratio": (ratio_B, (sign_B > 0).astype(mx.float32)),
        "worse_log_ratio": (ratio_B, (sign_B < 0).astype(mx.float32)),
    }


def _reference_N(tokens: ObjectiveInputs) -> mx.array:
    assert tokens.reference_logp_N is not None, "the learner scores the tokens of these objectives first"
    return tokens.reference_logp_N


def _log_ratio_B(logp_N: mx.array, tokens: ObjectiveInputs) -> mx.array:
    return tokens.sum_B(logp_N - _reference_N(tokens))


def _sign_B(tokens: ObjectiveInputs) -> mx.array:
    return mx.sign(tokens.sum_B(tokens.advantage_N))


def _difference_B(value_B: mx.array, tokens: ObjectiveInputs) -> mx.array:
    """Give both completions of a pair the value of the better one minus that of the worse one."""
    return tokens.group_sum_B(_sign_B(tokens) * value_B)


def _nll_B(logp_N: mx.array, tokens: ObjectiveInputs) -> mx.array:
    """Give both completions of a pair the mean of -log pi over the tokens of the better one."""
    return tokens.group_sum_B(mx.where(_sign_B(tokens) > 0, -tokens.mean_B(logp_N), 0.0))


def _log_sigmoid(value: mx.array) -> mx.array:
    return -mx.logaddexp(-value, mx.zeros_like(value))
