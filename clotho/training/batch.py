"""From scored groups to the minibatches of one update: advantages, loss weights and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.extension import TableDoor, provided
from clotho.models.parameters import Arrays, Parameters
from clotho.scoring.layouts.micro_batches import build_micro_batches, positions
from clotho.scoring.sequences import MicroBatch, TeacherRows, TrainingSequence, sampled_mask_T
from clotho.settings.learner import EnvironmentReference, KLPenalty, LearnerSection, RewardKLPenalty
from clotho.settings.objectives import (
    EnvironmentAdvantage,
    PreferenceObjective,
    RatioObjective,
)
from clotho.training.advantages import OfRewards, advantages, attached, environment_advantages
from clotho.training.gradient import FixedLogprobs, LearnerModel, LossConfig
from clotho.training.objectives.kl import ESTIMATORS
from clotho.training.objectives.loss import loss_weights
from clotho.training.reference_policy import ReferencePolicy
from protocols.rollout import ScoredGroup, TeacherTokens
from protocols.sampling import Completion


def training_sequence(
    number: int,
    group: ScoredGroup,
    i: int,
    advantage_T: NDArray[np.float64],
    share: float | NDArray[np.float64],
    settings: LearnerSection,
) -> TrainingSequence:
    """Return completion `i` of a group for training. number: index of the group. share: loss weight of its tokens.

    Reference log-probabilities and teacher are included only if the settings use them. Raises ValueError if the
    reference log-probabilities are missing.
    """
    completion, mask_T = group.group.completions[i], sampled_mask_T(group.group.completions[i])
    loss_mask_T = mask_T.astype(np.float32)
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
        loss_weight_T=np.asarray(share, dtype=np.float32) * loss_mask_T,
        supports=completion.supports,
        sampled_mask_T=mask_T if completion.sampled else None,
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
            f"group {group.group.prompt.group_id} has no reference log-probabilities, which "
            "learner.kl_penalty.reference = 'environment' requires"
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


PerTokenAdvantages = list[list[NDArray[np.float64]]]
"""Per group and completion: the advantage of each token, (T,)."""


class Minibatch(NamedTuple):
    """The data of one optimizer step. origins: index of group and completion by sequence. tokens: trained ones."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    origins: tuple[tuple[int, int], ...]


def compute_advantages(
    groups: Sequence[ScoredGroup],
    penalties: Sequence[NDArray[np.float64]],
    settings: LearnerSection,
    of_rewards: OfRewards | None = None,
) -> PerTokenAdvantages:
    """Return the advantage of every token: advantages per token from the group, or the completion's advantage.

    Groups with advantages per token do not influence the advantages of other groups, which may depend on the rewards of
    the whole batch. Tokens that the policy did not sample and masked completions get 0. The rewards of masked
    completions count in their group.

    penalties: subtracted from the reward of each completion first; empty without penalties. If a penalty is not finite,
    every advantage from rewards is not finite, and the update is rejected. of_rewards: those of an attachment.
    """
    in_tokens = isinstance(settings.objective.advantage, EnvironmentAdvantage)
    rewarded = [g for g, group in enumerate(groups) if not (in_tokens or group.token_advantages)]
    of_groups = dict(zip(rewarded, _by_rewards(rewarded, groups, penalties, settings, of_rewards), strict=True))
    found = [of_groups[g] if g in of_groups else environment_advantages(group) for g, group in enumerate(groups)]
    return [_zero_untrained(group, rows) for group, rows in zip(groups, found, strict=True)]


def _by_rewards(
    rewarded: Sequence[int],
    groups: Sequence[ScoredGroup],
    penalties: Sequence[NDArray[np.float64]],
    settings: LearnerSection,
    of_rewards: OfRewards | None,
) -> PerTokenAdvantages:
    completions = [groups[g].group.completions for g in rewarded]
    rewards = [np.asarray(groups[g].rewards, dtype=np.float64) for g in rewarded]
    if penalties:
        if not all(np.isfinite(penalties[g]).all() for g in rewarded):
            return [[np.full(len(c.tokens), np.nan) for c in members] for members in completions]
        rewards = [reward_G - penalties[g] for g, reward_G in zip(rewarded, rewards, strict=True)]
    found = advantages(settings.objective.advantage, rewards) if of_rewards is None else of_rewards(rewarded, rewards)
    return [
        [np.full(len(c.tokens), value) for c, value in zip(members, values_G, strict=True)]
        for members, values_G in zip(completions, found, strict=True)
    ]


def _zero_untrained(group: ScoredGroup, rows: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Return the advantages of trained tokens, and exact zeros for all others."""
    zero_advantage = group.zero_advantage or (False,) * len(rows)
    return [
        np.zeros_like(row_T) if silent else np.where(sampled_mask_T(completion), row_T, 0.0)
        for completion, row_T, silent in zip(group.group.completions, rows, zero_advantage, strict=True)
    ]


def teacher_weights(groups: Sequence[ScoredGroup]) -> dict[tuple[int, int], NDArray[np.float64]]:
    """Return the weights of what teachers say by (group, completion), with mean 1 over all sampled tokens: (T,) each.

    SRPO (arXiv:2604.02288), section 3.2. Completions without such weights are absent.
    """
    found = {
        (g, i): np.asarray(row_T)
        for g, group in enumerate(groups)
        for i, row_T in enumerate(group.teacher_weights)
        if row_T
    }
    sampled = [row_T[sampled_mask_T(groups[g].group.completions[i])] for (g, i), row_T in found.items()]
    mean = np.concatenate(sampled).mean() if sampled else 1.0
    return {place: row_T / mean for place, row_T in found.items()}


class Division(NamedTuple):
    """How groups are divided into minibatches, and these into micro-batches.

    max_tokens: largest possible length of a completion. layout: of the micro-batches. seed: of the assignment to
    minibatches. least: lowest number of micro-batches of a minibatch, as far as it has so many completions. replays:
    whether the learner takes the routes of the sampler.
    """

    settings: LearnerSection
    max_tokens: int
    layout: str
    seed: tuple[int, ...] = (0,)
    least: int = 1
    replays: bool = False

    def minibatches(self, groups: Sequence[ScoredGroup], token_advantages: PerTokenAdvantages) -> tuple[Minibatch, ...]:
        """Deal the groups to at most `num_minibatches` minibatches, and cut each into micro-batches.

        Completions that are not trained on are excluded. Raises ValueError if the policy sampled no token, if a group
        has no reference log-probabilities although the settings need them, or if a temperature is invalid.
        """
        if not any(c.length for g in groups for c in g.group.completions):
            raise ValueError("an update needs at least one completion token that the policy sampled")
        parts = min(self.settings.num_minibatches, len(groups))
        order = np.arange(len(groups)) if parts == 1 else np.random.default_rng(self.seed).permutation(len(groups))
        strides = [sorted(order[start::parts].tolist()) for start in range(parts)]
        weights = teacher_weights(groups) if self.settings.distillation_weight > 0 else {}
        batches = [self._minibatch(stride, groups, token_advantages, weights) for stride in strides]
        return tuple(batch for batch in batches if batch.tokens)

    def _minibatch(
        self,
        part: Sequence[int],
        groups: Sequence[ScoredGroup],
        token_advantages: PerTokenAdvantages,
        weights: Mapping[tuple[int, int], NDArray[np.float64]],
    ) -> Minibatch:
        settings = self.settings
        lengths = [
            [
                trained_tokens(c, a_T, settings)
                for c, a_T in zip(groups[g].group.completions, token_advantages[g], strict=True)
            ]
            for g in part
        ]
        shares = loss_weights(settings.objective.loss_aggregation, lengths, max_tokens=self.max_tokens)
        origins, sequences = [], []
        for g, lengths_G, shares_G in zip(part, lengths, shares, strict=True):
            for i, (length, share) in enumerate(zip(lengths_G, shares_G, strict=True)):
                if length:
                    origins.append((g, i))
                    share_T = float(share) * weights.get((g, i), 1.0)
                    sequences.append(training_sequence(g, groups[g], i, token_advantages[g][i], share_T, settings))
        in_pairs = isinstance(settings.objective, PreferenceObjective) and settings.objective.in_pairs
        return Minibatch(self.micro_batches(sequences, whole_groups=in_pairs), sum(map(sum, lengths)), tuple(origins))

    def micro_batches(
        self, sequences: Sequence[TrainingSequence], *, whole_groups: bool = False
    ) -> tuple[MicroBatch, ...]:
        """Return at least `least` micro-batches, as far as the sequences can be divided; none without a sequence."""
        budget = self.settings.micro_batch_tokens
        micro: tuple[MicroBatch, ...] = ()
        while sequences and budget and len(micro) < min(self.least, len(sequences)):
            budget = min(budget, max(map(positions, micro))) // 2 if micro else budget
            micro = build_micro_batches(
                sequences, layout=self.layout, budget=budget, whole_groups=whole_groups, replays=self.replays
            )
        return micro


def trained_tokens(completion: Completion, advantage_T: NDArray[np.float64], settings: LearnerSection) -> int:
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


class UpdateStart(NamedTuple):
    """What an update begins with. model: at `parameters` when the update has been prepared."""

    groups: Sequence[ScoredGroup]
    model: LearnerModel
    division: Division
    parameters: Parameters
    reference: ReferencePolicy
    loss_config: LossConfig


REFERENCE_POINTS: TableDoor[str] = TableDoor("library.REFERENCE_POINTS")
"""Functions of attachments as `module:name`, by the objectives that need them (`ObjectiveInputs.reference_point`).

Each is called with an `UpdateStart` and the advantages.
"""


def prepare(start: UpdateStart) -> TrainingBatch:
    """Prepare an update.

    A KL penalty in the reward is the sum of the KL estimates of a completion's tokens, computed with the sampler
    log-probabilities. The penalty is subtracted before advantages are computed. Reference log-probabilities in groups
    are used unchanged.
    """
    groups, model, division, parameters, reference, loss_config = start
    settings = loss_config.settings
    preliminary, own_advantages = compute_advantages(groups, (), settings), attached(settings.objective.advantage)
    minis = division.minibatches(groups, preliminary)
    references = _given_logprobs(minis) if reference_from_groups(settings) else None
    if reference.needed:
        references = scored(model, minis, reference)
    in_reward = references is not None and isinstance(settings.kl_penalty, RewardKLPenalty)
    penalties = _penalties(groups, minis, references, loss_config) if in_reward and references else ()
    at_start = Scores()
    if own_advantages is not None or _proximal_needed(settings, len(minis)):
        # Without own advantages, the first optimizer step has the scores of its own pass.
        known = int(own_advantages is None and settings.update_epochs == 1)
        at_start = [[]] * known + scored(model, minis[known:], parameters)
    of_rewards = None if own_advantages is None else own_advantages(start, minis, preliminary, at_start)
    token_advantages = compute_advantages(groups, penalties, settings, of_rewards)
    if in_reward or of_rewards is not None:
        minis = division.minibatches(groups, token_advantages)
    place = REFERENCE_POINTS().get(str(settings.objective.__struct_config__.tag))
    point = 0.0 if place is None else provided(place)(start, token_advantages)
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


def of_completions(
    groups: Sequence[ScoredGroup],
    minis: Sequence[Minibatch],
    values: Iterable[NDArray[np.float64]],
    *,
    others: float = 0.0,
) -> Weights:
    """Return a number for each completion. values: (B,) per micro-batch. others: of completions in none."""
    found = [np.full(len(group.rewards), others) for group in groups]
    origins = [mini.origins[member] for mini in minis for micro in mini.micro_batches for member in micro.members]
    for (group, completion), value in zip(origins, chain.from_iterable(values), strict=True):
        found[group][completion] = value
    return found


def with_scores(minis: Sequence[Minibatch], scores: Scores) -> Iterator[tuple[MicroBatch, mx.array]]:
    """Yield all micro-batches with their scores."""
    for mini, rows in zip(minis, scores, strict=True):
        yield from zip(mini.micro_batches, rows, strict=True)


def _proximal_needed(settings: LearnerSection, minis: int) -> bool:
    """Whether a gradient will be computed at weights other than those at the start of the update."""
    several = settings.update_epochs * minis > 1
    chosen = settings.objective
    return several and isinstance(chosen, RatioObjective) and chosen.ratio_reference == "batch_start"


def scored(model: LearnerModel, minis: Sequence[Minibatch], scoring: Parameters | ReferencePolicy) -> Scores:
    """Score the tokens of every minibatch under some parameters, or under the reference policy, with its own routes."""
    scores: Scores = []
    under: tuple[Parameters | None, Arrays]
    if isinstance(scoring, ReferencePolicy):
        scoring.use(model.policy)
        under = None, scoring.arrays
    else:
        model.policy.use(scoring)
        under = scoring, {}
    for mini in minis:
        micros = mini.micro_batches
        if isinstance(scoring, ReferencePolicy):
            micros = tuple(micro._replace(routes=None) for micro in micros)
        own: Sequence[int] = range(len(micros))
        if model.ranks is not None:
            own = model.ranks.assign_logprobs(micros, *under)
        found: dict[int, mx.array] = {}
        for k in own:
            found[k] = model.logprobs(micros[k])
            model.turns.pause()
        if model.ranks is not None:
            found |= model.ranks.collect_logprobs(model.turns)
        scores.append([found[k] for k in range(len(micros))])
    return scores


def _given_logprobs(minis: Sequence[Minibatch]) -> Scores:
    tables = [[micro.table for micro in mini.micro_batches] for mini in minis]
    return [[mx.array(table.reference_N) for table in part if table.reference_N is not None] for part in tables]


def _penalties(
    groups: Sequence[ScoredGroup], minis: Sequence[Minibatch], references: Scores, loss_config: LossConfig
) -> Weights:
    penalty, beta = loss_config.settings.kl_penalty, loss_config.loss_coefficients.kl_beta
    assert isinstance(penalty, KLPenalty)
    estimate = ESTIMATORS[penalty.estimator]

    def penalty_B(micro: MicroBatch, reference_N: mx.array) -> NDArray[np.float64]:
        kl_N = estimate(mx.array(micro.table.rollout_logp_N), reference_N)
        return beta * micro.sum_B(np.array(kl_N, dtype=np.float64))

    return of_completions(groups, minis, (penalty_B(*one) for one in with_scores(minis, references)))
