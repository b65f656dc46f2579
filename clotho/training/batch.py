"""From scored groups to the mini-batches of one update, on the host, the same way every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clotho.config.schema import LearnerSection
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import MicroBatch, drawn_T
from clotho.training.advantages import advantages, environment_advantages
from clotho.training.objectives.aggregation import coefficients
from clotho.training.training_sequence import training_sequence
from protocols.sampling import Completion
from protocols.score import ScoredGroup

TokenAdvantages = list[list[NDArray[np.float64]]]
"""Per group and completion: the advantage of each token, (T,)."""


class MiniBatch(NamedTuple):
    """What one optimizer step learns from.

    tokens: learnt ones, in number. places: of each sequence in it, the group and the completion that it is.
    """

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    places: tuple[tuple[int, int], ...]


def judge(
    groups: Sequence[ScoredGroup], penalties: Sequence[NDArray[np.float64]], settings: LearnerSection
) -> TokenAdvantages:
    """Advantage of every token: of its completion, or token by token where the group's environment gave them so.

    Groups that bring advantages of their own have no part in those of the others, whose rewards may be looked at over
    the whole batch. It is 0 for tokens that the policy did not draw, and for muted completions, whose rewards do count
    among those of their group.

    penalties: taken from the reward of each completion first; empty for none. Where one of them is not finite no
    advantage of a reward is, so that the update will be skipped.
    """
    own = [settings.advantage == "environment" or bool(group.token_advantages) for group in groups]
    judged = [g for g, given in enumerate(own) if not given]
    of_rewards = iter(
        _by_rewards([groups[g] for g in judged], [penalties[g] for g in judged] if penalties else (), settings)
    )
    found = [
        environment_advantages([group])[0] if given else next(of_rewards)
        for group, given in zip(groups, own, strict=True)
    ]
    return [_where_taught(group, rows) for group, rows in zip(groups, found, strict=True)]


def _by_rewards(
    groups: Sequence[ScoredGroup], penalties: Sequence[NDArray[np.float64]], settings: LearnerSection
) -> TokenAdvantages:
    if not all(np.isfinite(penalty_G).all() for penalty_G in penalties):
        return [[np.full(len(c.tokens), np.nan) for c in group.group.completions] for group in groups]
    rewards = [np.asarray(group.rewards, dtype=np.float64) for group in groups]
    if penalties:
        rewards = [reward_G - penalty_G for reward_G, penalty_G in zip(rewards, penalties, strict=True)]
    of_completions = advantages(
        settings.advantage, rewards, deviation=settings.advantage_deviation, epsilon=settings.advantage_epsilon
    )
    return [
        [np.full(len(c.tokens), value) for c, value in zip(group.group.completions, values_G, strict=True)]
        for group, values_G in zip(groups, of_completions, strict=True)
    ]


def _where_taught(group: ScoredGroup, rows: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """The advantages of what may learn from them, and exact zeros."""
    muted = group.muted or (False,) * len(rows)
    return [
        np.zeros_like(row_T) if silent else np.where(drawn_T(completion), row_T, 0.0)
        for completion, row_T, silent in zip(group.group.completions, rows, muted, strict=True)
    ]


def mini_batches(
    groups: Sequence[ScoredGroup],
    token_advantages: TokenAdvantages,
    *,
    settings: LearnerSection,
    max_tokens: int,
    layout: str,
    seed: Sequence[int],
) -> tuple[MiniBatch, ...]:
    """Deal the groups to at most `mini_batches` parts, and cut each part into micro-batches.

    Which groups lie together is a function of `seed`. Completions that nothing is learnt from are left out. Raises
    ValueError if the policy drew no token at all, and for groups that bring no reference log-probabilities where they
    are learnt from, or temperatures that are none.
    """
    if not any(c.length for g in groups for c in g.group.completions):
        raise ValueError("an update needs at least one completion token that the policy drew")
    order = list(range(len(groups)))
    parts = min(settings.mini_batches, len(groups))
    if parts > 1:
        order = [int(index) for index in np.random.default_rng(list(seed)).permutation(len(groups))]
    dealt = [sorted(order[start::parts]) for start in range(parts)]
    batches = [_mini_batch(part, groups, token_advantages, settings, max_tokens, layout) for part in dealt]
    return tuple(batch for batch in batches if batch.tokens)


def _mini_batch(
    part: Sequence[int],
    groups: Sequence[ScoredGroup],
    token_advantages: TokenAdvantages,
    settings: LearnerSection,
    max_tokens: int,
    layout: str,
) -> MiniBatch:
    lengths = [[_learnt(c, settings) for c in groups[g].group.completions] for g in part]
    shares = coefficients(settings.aggregation, lengths, max_tokens=max_tokens)
    places, sequences = [], []
    for g, lengths_G, shares_G in zip(part, lengths, shares, strict=True):
        for i, (length, share) in enumerate(zip(lengths_G, shares_G, strict=True)):
            if length:
                places.append((g, i))
                sequences.append(training_sequence(g, groups[g], i, token_advantages[g][i], float(share), settings))
    micro = build_micro_batches(sequences, layout=layout, budget=settings.micro_batch_tokens) if sequences else ()
    return MiniBatch(micro, sum(map(sum, lengths)), tuple(places))


def _learnt(completion: Completion, settings: LearnerSection) -> int:
    """How many tokens of a completion are learnt from."""
    cut_off = settings.mask_truncated and completion.finish_reason == "length"
    return 0 if cut_off else completion.length
