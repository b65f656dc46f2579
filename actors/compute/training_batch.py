"""From scored groups to the mini-batches of one update, on the host, the same way every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.compute.advantages import advantages, environment_advantages
from actors.compute.layouts.micro_batches import build_micro_batches
from actors.compute.objectives.aggregation import coefficients
from actors.compute.sequences import MicroBatch, TrainingSequence
from protocols.profile import LearnerSection
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
    """Advantage of every token: of its completion, unless the environment gave them token by token.

    penalties: taken from the reward of each completion first; empty for none. Where one of them is not finite no
    advantage is, so that the update will be skipped.
    """
    if settings.advantage == "environment":
        return environment_advantages(groups)
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
    ValueError if there is no completion token at all.
    """
    if not any(c.tokens for g in groups for c in g.group.completions):
        raise ValueError("an update needs at least one completion token")
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
                sequences.append(_sequence(g, groups[g], i, token_advantages[g][i], float(share)))
    micro = build_micro_batches(sequences, layout=layout, budget=settings.micro_batch_tokens) if sequences else ()
    return MiniBatch(micro, sum(map(sum, lengths)), tuple(places))


def _learnt(completion: Completion, settings: LearnerSection) -> int:
    """How many tokens of a completion are learnt from."""
    cut_off = settings.mask_truncated and completion.finish_reason == "length"
    return 0 if cut_off else len(completion.tokens)


def _sequence(
    number: int, group: ScoredGroup, i: int, advantage_T: NDArray[np.float64], share: float
) -> TrainingSequence:
    completion = group.group.completions[i]
    T = len(completion.tokens)
    return TrainingSequence(
        group=number,
        prompt=group.group.prompt.tokens,
        tokens=completion.tokens,
        behaviour_T=np.asarray(completion.logprobs, dtype=np.float32),
        version_T=np.asarray(completion.versions, dtype=np.int32),
        advantage_T=advantage_T.astype(np.float32),
        weight_T=np.ones(T, dtype=np.float32),
        coefficient_T=np.full(T, share, dtype=np.float32),
        supports=completion.supports,
    )
