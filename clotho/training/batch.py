"""From scored groups to the minibatches of one update: advantages, loss weights and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from clotho.models.parameters import Parameters
from clotho.models.policy_model import WeightedModel
from clotho.models.turns import TurnBudget
from clotho.scoring.layouts.micro_batches import build_micro_batches, positions
from clotho.scoring.sequences import MicroBatch, TeacherRows, TrainingSequence, sampled_mask_T
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.learner import EnvironmentReference, KLPenalty, LearnerSection, RewardKLPenalty
from clotho.settings.objectives import (
    EnvironmentAdvantage,
    GradientNorm,
    Kto,
    OptimalBaselineAdvantage,
    PreferenceObjective,
    RatioObjective,
)
from clotho.training.advantages import advantages, environment_advantages
from clotho.training.gradient import FixedLogprobs, LossConfig, OtherRanks, compute_logprobs, score_norm_squared
from clotho.training.objectives.kl import ESTIMATORS
from clotho.training.objectives.loss import loss_weights
from clotho.training.reference_policy import ReferencePolicy
from protocols.rollout import ScoredGroup, TeacherTokens
from protocols.sampling import Completion


def training_sequence(
    number: int, group: ScoredGroup, i: int, advantage_T: NDArray[np.float64], share: float, settings: LearnerSection
) -> TrainingSequence:
    """Return completion `i` of a group for training. number: index of the group. share: loss weight of its tokens.

    Reference log-probabilities and teacher are included only if the settings use them. Raises ValueError if the
    reference log-probabilities are missing.
    """
    completion = group.group.completions[i]
    loss_mask_T = sampled_mask_T(completion).astype(np.float32)
    distils = settings.distillation_weight > 0
    taught_T = group.teacher_logprobs[i] if distils and group.teacher_logprobs else ()
    has_teacher = distils and bool(group.teacher) and bool(group.teacher[i].tokens)
    return TrainingSequence(
        group=number,
        prompt=group.group.prompt.tokens,
        tokens=completion.tokens,
        rollout_logp_T=np.asarray(completion.logprobs, dtype=np.float32),
        version_T=np.asarray(completion.versions, dtype=np.int32),
        advantage_T=advantage_T.astype(np.float32),
        loss_mask_T=loss_mask_T,
        loss_weight_T=np.float32(share) * loss_mask_T,
        supports=completion.supports,
        sampled_mask_T=sampled_mask_T(completion) if completion.sampled else None,
        temperature=temperature_of(group, i),
        reference_T=_reference_T(group, i) if reference_from_groups(settings) else None,
        teacher=_teacher_rows(group.teacher[i], completion) if has_teacher else None,
        teacher_logp_T=np.asarray(taught_T, dtype=np.float32) if taught_T else None,
        route_I_E=None if settings.router_replay == "off" else route_rows(group.group.prompt.tokens, completion),
    )


def route_rows(prompt: Sequence[int], completion: Completion) -> NDArray[np.uint8] | None:
    """Return the bytes of the routes of all tokens but the last, (I, E); None if the sampler has recorded none."""
    if completion.routes is None:
        return None
    inputs, experts = len(prompt) + len(completion.tokens) - 1, completion.routes.experts
    if len(experts) != inputs * completion.routes.token_bytes:
        raise ValueError(f"a completion has {len(experts)} bytes of routes for {inputs} tokens")
    return np.frombuffer(experts, dtype=np.uint8).reshape(inputs, -1)


def reference_from_groups(settings: LearnerSection) -> bool:
    """Whether groups contain the log-probabilities of the reference policy."""
    return isinstance(settings.reference, EnvironmentReference)


def temperature_of(group: ScoredGroup, i: int) -> float:
    """Return the sampling temperature of completion `i`; 0 means the temperature of the run."""
    return group.temperatures[i] if group.temperatures else 0.0


def _reference_T(group: ScoredGroup, i: int) -> NDArray[np.float32]:
    if not group.reference_logprobs:
        raise ValueError(
            f"{_name(group)} has no reference log-probabilities, which learner.kl_penalty.reference = 'environment' "
            "requires"
        )
    return np.asarray(group.reference_logprobs[i], dtype=np.float32)


def _teacher_rows(teacher: TeacherTokens, completion: Completion) -> TeacherRows:
    """Return the teacher's alternatives at sampled tokens, with probabilities normalized per token."""
    at_D = np.flatnonzero(sampled_mask_T(completion))
    token_D_K = np.asarray([teacher.tokens[t] for t in at_D], dtype=np.int32).reshape(len(at_D), -1)
    logp_D_K = np.asarray([teacher.logprobs[t] for t in at_D], dtype=np.float64).reshape(token_D_K.shape)
    largest_D_1 = np.max(logp_D_K, axis=-1, keepdims=True, initial=-np.inf)
    p_D_K = np.exp(logp_D_K - np.where(np.isneginf(largest_D_1), 0.0, largest_D_1))
    sum_D_1 = p_D_K.sum(axis=-1, keepdims=True)
    T, K = len(completion.tokens), max(1, token_D_K.shape[1])
    rows = TeacherRows(np.full((T, K), -1, dtype=np.int32), np.zeros((T, K), dtype=np.float32))
    rows.token_T_K[at_D, : token_D_K.shape[1]] = np.where(p_D_K == 0, -1, token_D_K)
    rows.share_T_K[at_D, : token_D_K.shape[1]] = p_D_K / np.where(sum_D_1 == 0, 1.0, sum_D_1)
    return rows


def _name(group: ScoredGroup) -> str:
    return f"group {group.group.prompt.group_id}"


PerTokenAdvantages = list[list[NDArray[np.float64]]]
"""Per group and completion: the advantage of each token, (T,)."""


class Minibatch(NamedTuple):
    """The data of one optimizer step.

    tokens: number of trained tokens. origins: per sequence, (index of its group, index of its completion).
    """

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    origins: tuple[tuple[int, int], ...]


def compute_advantages(
    groups: Sequence[ScoredGroup],
    penalties: Sequence[NDArray[np.float64]],
    settings: LearnerSection,
    log_weights: Sequence[NDArray[np.float64]] = (),
) -> PerTokenAdvantages:
    """Return the advantage of every token: advantages per token from the group, or the completion's advantage.

    Groups with advantages per token do not influence the advantages of other groups, which may depend on the rewards of
    the whole batch. Tokens that the policy did not sample and masked completions get 0. The rewards of masked
    completions count in their group.

    penalties: subtracted from the reward of each completion first; empty without penalties. If a penalty is not finite,
    every advantage from rewards is not finite, and the update is rejected. log_weights: weights of completions in the
    baseline of least variance, (G,) per group; empty for other advantages.
    """
    own = [
        isinstance(settings.objective.advantage, EnvironmentAdvantage) or bool(group.token_advantages)
        for group in groups
    ]
    rewarded = [g for g, given in enumerate(own) if not given]
    of_rewards = iter(
        _by_rewards(
            [groups[g] for g in rewarded],
            [penalties[g] for g in rewarded] if penalties else (),
            settings,
            [log_weights[g] for g in rewarded] if log_weights else (),
        )
    )
    found = [
        environment_advantages([group])[0] if given else next(of_rewards)
        for group, given in zip(groups, own, strict=True)
    ]
    return [_zero_untrained(group, rows) for group, rows in zip(groups, found, strict=True)]


def _by_rewards(
    groups: Sequence[ScoredGroup],
    penalties: Sequence[NDArray[np.float64]],
    settings: LearnerSection,
    log_weights: Sequence[NDArray[np.float64]],
) -> PerTokenAdvantages:
    if not all(np.isfinite(penalty_G).all() for penalty_G in penalties):
        return [[np.full(len(c.tokens), np.nan) for c in group.group.completions] for group in groups]
    rewards = [np.asarray(group.rewards, dtype=np.float64) for group in groups]
    if penalties:
        rewards = [reward_G - penalty_G for reward_G, penalty_G in zip(rewards, penalties, strict=True)]
    of_completions = advantages(settings.objective.advantage, rewards, log_weights)
    return [
        [np.full(len(c.tokens), value) for c, value in zip(group.group.completions, values_G, strict=True)]
        for group, values_G in zip(groups, of_completions, strict=True)
    ]


def _zero_untrained(group: ScoredGroup, rows: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Return the advantages of trained tokens, and exact zeros for all others."""
    zero_advantage = group.zero_advantage or (False,) * len(rows)
    return [
        np.zeros_like(row_T) if silent else np.where(sampled_mask_T(completion), row_T, 0.0)
        for completion, row_T, silent in zip(group.group.completions, rows, zero_advantage, strict=True)
    ]


def minibatches(
    groups: Sequence[ScoredGroup],
    token_advantages: PerTokenAdvantages,
    *,
    settings: LearnerSection,
    max_tokens: int,
    layout: str,
    seed: Sequence[int],
    least: int = 1,
    replays: bool = False,
) -> tuple[Minibatch, ...]:
    """Deal the groups to at most `num_minibatches` minibatches, and cut each into micro-batches.

    `seed` determines the assignment. least: lowest number of micro-batches of a minibatch, as far as it has so many
    completions. replays: whether the learner takes the routes of the sampler. Completions that are not trained on are
    excluded. Raises ValueError if the policy sampled no token, if a group has no reference log-probabilities although
    the settings need them, or if a temperature is invalid.
    """
    if not any(c.length for g in groups for c in g.group.completions):
        raise ValueError("an update needs at least one completion token that the policy sampled")
    order = list(range(len(groups)))
    parts = min(settings.num_minibatches, len(groups))
    if parts > 1:
        order = [int(index) for index in np.random.default_rng(list(seed)).permutation(len(groups))]
    strides = [sorted(order[start::parts]) for start in range(parts)]
    batches = [
        _minibatch(part, groups, token_advantages, settings, max_tokens, layout, least, replays=replays)
        for part in strides
    ]
    return tuple(batch for batch in batches if batch.tokens)


def _minibatch(
    part: Sequence[int],
    groups: Sequence[ScoredGroup],
    token_advantages: PerTokenAdvantages,
    settings: LearnerSection,
    max_tokens: int,
    layout: str,
    least: int,
    *,
    replays: bool,
) -> Minibatch:
    lengths = [
        [
            _trained_tokens(c, a_T, settings)
            for c, a_T in zip(groups[g].group.completions, token_advantages[g], strict=True)
        ]
        for g in part
    ]
    shares = loss_weights(settings.objective.loss_aggregation, lengths, max_tokens=max_tokens)
    origins, sequences = [], []
    for g, lengths_G, shares_G in zip(part, lengths, shares, strict=True):
        for i, (length, share) in enumerate(zip(lengths_G, shares_G, strict=True)):
            if length:
                origins.append((g, i))
                sequences.append(training_sequence(g, groups[g], i, token_advantages[g][i], float(share), settings))
    in_pairs = isinstance(settings.objective, PreferenceObjective) and settings.objective.in_pairs
    micro = _micro_batches(sequences, settings, layout=layout, least=least, whole_groups=in_pairs, replays=replays)
    return Minibatch(micro, sum(map(sum, lengths)), tuple(origins))


def _micro_batches(
    sequences: Sequence[TrainingSequence],
    settings: LearnerSection,
    *,
    layout: str,
    least: int,
    whole_groups: bool,
    replays: bool,
) -> tuple[MicroBatch, ...]:
    """Return at least `least` micro-batches, as far as the sequences can be divided; none without a sequence."""
    budget = settings.micro_batch_tokens
    micro: tuple[MicroBatch, ...] = ()
    while sequences and budget and len(micro) < min(least, len(sequences)):
        budget = min(budget, max(map(positions, micro))) // 2 if micro else budget
        micro = build_micro_batches(sequences, layout=layout, budget=budget, whole_groups=whole_groups, replays=replays)
    return micro


def _trained_tokens(completion: Completion, advantage_T: NDArray[np.float64], settings: LearnerSection) -> int:
    """Return the number of trained tokens of a completion; objectives of preferences leave out all but a pair."""
    cut_off = settings.objective.mask_truncated and completion.finish_reason == "length"
    outside = isinstance(settings.objective, PreferenceObjective) and not advantage_T.any()
    return 0 if cut_off or outside else completion.length


Scores = list[list[mx.array]]
"""Per minibatch and micro-batch: log-probabilities of its tokens, (N,)."""

Weights = list[NDArray[np.float64]]
"""Per group: a logarithm for each completion, (G,)."""


class TrainingBatch(NamedTuple):
    """The minibatches of an update, the fixed log-probabilities of each micro-batch, and all advantages."""

    minibatches: tuple[Minibatch, ...]
    fixed_logprobs: tuple[tuple[FixedLogprobs, ...], ...]
    advantages: PerTokenAdvantages

    @property
    def tokens(self) -> int:
        """Number of trained tokens, each counted once."""
        return sum(mini.tokens for mini in self.minibatches)


def prepare(
    groups: Sequence[ScoredGroup],
    *,
    policy: WeightedModel,
    forcing: TeacherForcing,
    parameters: Parameters,
    reference: ReferencePolicy,
    loss_config: LossConfig,
    max_tokens: int,
    seed: Sequence[int],
    turns: TurnBudget,
    replays: bool = False,
    ranks: OtherRanks | None = None,
) -> TrainingBatch:
    """Prepare an update from `parameters`. replays: whether the learner takes the routes of the sampler.

    A KL penalty in the reward is the sum of the KL estimates of a completion's tokens, computed with the sampler
    log-probabilities. The penalty is subtracted before advantages are computed. Reference log-probabilities in groups
    are used unchanged. A baseline of least variance is that of `parameters`, for every optimizer step of the update.
    """
    settings = loss_config.settings

    def divided(token_advantages: PerTokenAdvantages) -> tuple[Minibatch, ...]:
        """Return the minibatches with these advantages."""
        return minibatches(
            groups,
            token_advantages,
            settings=settings,
            max_tokens=max_tokens,
            layout=forcing.layout,
            seed=seed,
            least=1 if ranks is None else ranks.pieces,
            replays=replays,
        )

    preliminary = compute_advantages(groups, (), settings)
    minis = divided(preliminary)
    references = _given_logprobs(minis) if reference_from_groups(settings) else None
    if reference.needed:
        references = _scored(minis, policy, forcing, loss_config, reference, turns, ranks)
    in_reward = references is not None and isinstance(settings.kl_penalty, RewardKLPenalty)
    penalties = _penalties(groups, minis, references, loss_config) if in_reward and references else ()
    advantage, at_start, log_weights = settings.objective.advantage, Scores(), Weights()
    if _proximal_needed(settings, len(minis)) and not isinstance(advantage, OptimalBaselineAdvantage):
        known = int(settings.update_epochs == 1)  # the first optimizer step has those of its own pass
        at_start = [[]] * known + _scored(minis[known:], policy, forcing, loss_config, parameters, turns, ranks)
    if isinstance(advantage, OptimalBaselineAdvantage):
        at_start = _scored(minis, policy, forcing, loss_config, parameters, turns, ranks)
        log_weights = log_variance_weights(groups, minis, at_start, gradient_norm=advantage.gradient_norm)
        if advantage.gradient_norm == "exact":
            given = (groups, preliminary, policy, forcing, parameters, loss_config)
            log_norms = _exact_norms(*given, max_tokens=max_tokens, turns=turns, replays=replays)
            log_weights = [weight_G + norm_G for weight_G, norm_G in zip(log_weights, log_norms, strict=True)]
    token_advantages = compute_advantages(groups, penalties, settings, log_weights)
    if in_reward or log_weights:
        minis = divided(token_advantages)
    point = 0.0
    if isinstance(settings.objective, Kto):
        point = _reference_point(
            _of_other_prompts(groups, token_advantages, settings),
            policy,
            forcing,
            loss_config,
            (parameters, reference),
            turns=turns,
            ranks=ranks,
        )
    fixed_logprobs = tuple(
        tuple(
            FixedLogprobs(
                references[m][k] if references else None,
                at_start[m][k] if any(at_start[m : m + 1]) else None,
                point,
            )
            for k in range(len(mini.micro_batches))
        )
        for m, mini in enumerate(minis)
    )
    return TrainingBatch(minis, fixed_logprobs, token_advantages)


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
    found = [np.full(len(group.rewards), -np.inf) for group in groups]
    for mini, rows in zip(minis, scores, strict=True):
        for micro, logp_N in zip(mini.micro_batches, rows, strict=True):
            pi_N = np.array(logp_N, dtype=np.float64)
            norm_N = np.square(np.expm1(pi_N)) if gradient_norm == "probabilities" else np.ones_like(pi_N)
            norm_B = np.ones(micro.sequences) if gradient_norm == "exact" else micro.sum_B(norm_N)
            with np.errstate(divide="ignore"):
                log_weight_B = 2.0 * micro.log_weight_B(pi_N) + np.log(norm_B)
            for member, log_weight in zip(micro.members, log_weight_B, strict=True):
                group, completion = mini.origins[member]
                found[group][completion] = log_weight
    return found


def _exact_norms(
    groups: Sequence[ScoredGroup],
    token_advantages: PerTokenAdvantages,
    policy: WeightedModel,
    forcing: TeacherForcing,
    parameters: Parameters,
    loss_config: LossConfig,
    *,
    max_tokens: int,
    turns: TurnBudget,
    replays: bool,
) -> Weights:
    """Return log |grad log pi|^2 of every completion, computed in micro-batches of one completion."""
    alone = replace(loss_config.settings, micro_batch_tokens=1, num_minibatches=1)
    found = [np.zeros(len(group.rewards)) for group in groups]
    for mini in minibatches(
        groups, token_advantages, settings=alone, max_tokens=max_tokens, layout="padded", seed=(0,), replays=replays
    ):
        for micro in mini.micro_batches:
            group, completion = mini.origins[micro.members[0]]
            norm = score_norm_squared(policy, forcing, parameters, micro, loss_config=loss_config, turns=turns)
            with np.errstate(divide="ignore"):
                found[group][completion] = np.log(norm)
            turns.pause()
    return found


def _proximal_needed(settings: LearnerSection, minis: int) -> bool:
    """Whether a gradient will be computed at weights other than those at the start of the update."""
    several = settings.update_epochs * minis > 1
    chosen = settings.objective
    return several and isinstance(chosen, RatioObjective) and chosen.ratio_reference == "batch_start"


def _scored(
    minis: Sequence[Minibatch],
    policy: WeightedModel,
    forcing: TeacherForcing,
    loss_config: LossConfig,
    scoring: Parameters | ReferencePolicy,
    turns: TurnBudget,
    ranks: OtherRanks | None,
) -> Scores:
    """Score the tokens of every minibatch under some parameters, or under the reference policy, with its own routes."""
    scores: Scores = []
    if isinstance(scoring, ReferencePolicy):
        scoring.use(policy)
    else:
        policy.use(scoring)
    for mini in minis:
        micros = mini.micro_batches
        if isinstance(scoring, ReferencePolicy):
            micros = tuple(micro._replace(routes=None) for micro in micros)
        own: Sequence[int] = range(len(micros))
        if ranks is not None:
            own = ranks.assign_logprobs(
                micros,
                *((None, scoring.arrays()) if isinstance(scoring, ReferencePolicy) else (scoring, {})),
            )
        found: dict[int, mx.array] = {}
        for k in own:
            found[k] = compute_logprobs(policy, forcing, micros[k], loss_config.distribution, turns=turns)
            turns.pause()
        if ranks is not None:
            found |= ranks.collect_logprobs(turns)
        scores.append([found[k] for k in range(len(micros))])
    return scores


def _of_other_prompts(
    groups: Sequence[ScoredGroup], token_advantages: PerTokenAdvantages, settings: LearnerSection
) -> list[TrainingSequence]:
    """Return the trained completions behind the prompts of the next group each; none if there is one group."""
    if len(groups) < 2:
        return []
    found = []
    for g, (group, rows) in enumerate(zip(groups, token_advantages, strict=True)):
        other = groups[(g + 1) % len(groups)].group.prompt.tokens
        for i, advantage_T in enumerate(rows):
            if _trained_tokens(group.group.completions[i], advantage_T, settings):
                sequence = training_sequence(g, group, i, advantage_T, 0.0, settings)
                found.append(sequence._replace(prompt=other, supports=(), teacher=None, route_I_E=None))
    return found


def _reference_point(
    sequences: Sequence[TrainingSequence],
    policy: WeightedModel,
    forcing: TeacherForcing,
    loss_config: LossConfig,
    compared: tuple[Parameters, ReferencePolicy],
    *,
    turns: TurnBudget,
    ranks: OtherRanks | None,
) -> float:
    """Return max(0, the mean of log pi(y') - log ref(y') over sequences): KTO (arXiv:2402.01306), section 4.1."""
    least = 1 if ranks is None else ranks.pieces
    micro = _micro_batches(
        sequences, loss_config.settings, layout=forcing.layout, least=least, whole_groups=False, replays=False
    )
    if not micro:
        return 0.0
    mini = Minibatch(micro, 0, ())
    own, reference = (_scored([mini], policy, forcing, loss_config, one, turns, ranks)[0] for one in compared)
    ratios = [
        one.sum_B(np.array(own_N, dtype=np.float64) - np.array(reference_N, dtype=np.float64))
        for one, own_N, reference_N in zip(micro, own, reference, strict=True)
    ]
    return max(0.0, float(np.concatenate(ratios).mean()))


def _given_logprobs(minis: Sequence[Minibatch]) -> Scores:
    tables = [[micro.table for micro in mini.micro_batches] for mini in minis]
    return [[mx.array(table.reference_N) for table in part if table.reference_N is not None] for part in tables]


def _penalties(
    groups: Sequence[ScoredGroup], minis: Sequence[Minibatch], references: Scores, loss_config: LossConfig
) -> list[NDArray[np.float64]]:
    penalty = loss_config.settings.kl_penalty
    assert isinstance(penalty, KLPenalty)
    estimate = ESTIMATORS[penalty.estimator]
    penalties = [np.zeros(len(group.rewards)) for group in groups]
    for mini, scores in zip(minis, references, strict=True):
        for micro, reference_N in zip(mini.micro_batches, scores, strict=True):
            kl_N = np.array(estimate(mx.array(micro.table.rollout_logp_N), reference_N), dtype=np.float64)
            kl_B = np.bincount(micro.table.sequence_N, kl_N * micro.table.loss_mask_N, minlength=micro.sequences)
            for member, kl in zip(micro.members, kl_B, strict=True):
                group, completion = mini.origins[member]
                penalties[group][completion] = loss_config.loss_coefficients.kl_beta * kl
    return penalties
