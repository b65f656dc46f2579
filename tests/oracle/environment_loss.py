"""The loss of groups from environments under a bigram model, in loops and float64.

What the policy did not draw is read, as the token before the next one, and is in no sum, no mean and no count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from clotho.settings.learner import LearnerSection
from protocols.rollout import ScoredGroup
from protocols.sampling import Completion
from tests.learner_settings import short_names
from tests.oracle.advantages import advantages
from tests.oracle.policy_loss import Example, Rows, kl, loss, share

Weights = Mapping[str, np.ndarray]
"""model.weight: (V, D), a row per token; lm_head.weight: (V, D)."""


class Run(Struct, frozen=True, kw_only=True):
    """What the profile says. temperature, bias: of the distribution where a group has none of its own."""

    settings: LearnerSection
    temperature: float
    bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int


class Scores(Struct, frozen=True, kw_only=True):
    """Of the sampled tokens of the completions that have any."""

    logp: Rows
    entropy: Rows
    cross_entropy: Rows


def sampled(completion: Completion) -> list[int]:
    """Places of the tokens that the policy drew."""
    return [t for t in range(len(completion.tokens)) if not completion.sampled or completion.sampled[t]]


def places(groups: Sequence[ScoredGroup]) -> list[tuple[int, int]]:
    """Group and number of the completions that count."""
    return [(g, i) for g, one in enumerate(groups) for i, c in enumerate(one.group.completions) if sampled(c)]


def scores(weights: Weights, groups: Sequence[ScoredGroup], run: Run) -> Scores:
    """Log-probability and entropy of what was sampled, and what of a teacher's alternatives is missed."""
    found = Scores(logp=[], entropy=[], cross_entropy=[])
    for g, i in places(groups):
        group, completion = groups[g], groups[g].group.completions[i]
        temperature = group.temperatures[i] if group.temperatures else run.temperature
        contexts = list(pairwise((*group.group.prompt.tokens, *completion.tokens)))[-len(completion.tokens) :]
        rows: list[list[float]] = [[], [], []]
        for t in sampled(completion):
            before, token = contexts[t]
            z_V = weights["lm_head.weight"] @ weights["model.weight"][before]
            for biased, addend in run.bias:
                z_V[biased] += addend
            logp_V = z_V / temperature - np.log(np.exp(z_V / temperature).sum())
            could = np.frombuffer(completion.supports[t], "<u4") if completion.supports else np.arange(len(z_V))
            within_K = logp_V[could] - np.log(np.exp(logp_V[could]).sum())
            rows[0].append(float(within_K[list(could).index(token)]))
            rows[1].append(float(-(np.exp(within_K) * within_K).sum()))
            rows[2].append(missed(group, i, t, logp_V))
        for kind, row in zip((found.logp, found.entropy, found.cross_entropy), rows, strict=True):
            kind.append(row)
    return found


def missed(group: ScoredGroup, i: int, t: int, logp_V: np.ndarray) -> float:
    """Cross-entropy of a teacher's alternatives, as shares of what it gave to them all, over the whole vocabulary."""
    if not group.teacher:
        return 0.0
    p = np.exp(group.teacher[i].logprobs[t])
    tokens = list(group.teacher[i].tokens[t])
    return float(-sum(p_k / p.sum() * logp_V[k] for p_k, k in zip(p, tokens, strict=True)))


def examples(groups: Sequence[ScoredGroup], still: Scores, run: Run) -> list[Example]:
    """The completions that count, their sampled tokens alone."""
    found = []
    for (g, i), entropy in zip(places(groups), still.entropy, strict=True):
        completion, at = groups[g].group.completions[i], sampled(groups[g].group.completions[i])
        references = groups[g].reference_logprobs
        found.append(
            Example(
                group=g,
                behaviour=[completion.logprobs[t] for t in at],
                proximal=[0.0] * len(at),
                reference=[references[i][t] for t in at] if references else [0.0] * len(at),
                advantage=[0.0] * len(at),
                entropy=entropy,
                learned=[True] * len(at),
            )
        )
    return judged(groups, found, run)


def judged(groups: Sequence[ScoredGroup], found: list[Example], run: Run) -> list[Example]:
    """The same with their advantages."""
    settings = short_names(run.settings)
    rewards = [list(group.rewards) for group in groups]
    for (g, i), e in zip(places(groups), found, strict=True):
        if settings.kl_beta and settings.kl_in == "reward":
            penalty = sum(kl(e, t, e.behaviour, e.behaviour, settings) for t in range(len(e.learned)))
            rewards[g][i] -= settings.kl_beta * penalty
    others = [g for g, group in enumerate(groups) if not group.token_advantages]
    of_rewards = advantages(
        settings.advantage,
        [rewards[g] for g in others],
        spread=settings.advantage_deviation,
        epsilon=settings.advantage_epsilon,
    )
    result = []
    for (g, i), e in zip(places(groups), found, strict=True):
        at = sampled(groups[g].group.completions[i])
        if groups[g].zero_advantage and groups[g].zero_advantage[i]:
            advantage = [0.0] * len(at)
        elif groups[g].token_advantages:
            advantage = [groups[g].token_advantages[i][t] for t in at]
        else:
            advantage = [of_rewards[others.index(g)][i]] * len(at)
        result.append(
            Example(
                group=e.group,
                behaviour=e.behaviour,
                proximal=e.proximal,
                reference=e.reference,
                advantage=advantage,
                entropy=e.entropy,
                learned=e.learned,
            )
        )
    return result


def environment_loss(still: Weights, groups: Sequence[ScoredGroup], run: Run) -> Callable[[Weights], float]:
    """The loss of an update that begins at the weights `still`, its first step, by the weights that it moves."""
    frozen = scores(still, groups, run)
    batch = examples(groups, frozen, run)
    names = short_names(run.settings)
    shares = [names.distillation_weight * share(e, batch, names, run.max_tokens) for e in batch]

    def at(weights: Weights) -> float:
        moved = scores(weights, groups, run)
        total: float = loss(
            batch,
            moved.logp,
            frozen.logp,
            moved.entropy,
            settings=run.settings,
            max_tokens=run.max_tokens,
            several_steps=False,
        )
        for weight, row in zip(shares, moved.cross_entropy, strict=True):
            total += weight * sum(row)
        return total

    return at
