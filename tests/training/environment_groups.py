"""Groups as environments send them: several turns, temperatures, teachers, references, zero_advantage completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from protocols.rollout import ScoredGroup, TeacherTokens
from protocols.sampling import Completion
from tests.training.policies_and_groups import random_groups


def with_completions(group: ScoredGroup, completions: Sequence[Completion], **fields: Any) -> ScoredGroup:
    """The same group with other completions, and whatever belongs to them."""
    return replace(group, group=replace(group.group, completions=tuple(completions)), **fields)


def masked(group: ScoredGroup, rng: np.random.Generator) -> ScoredGroup:
    """The policy drew some tokens of each completion, and none of the last of several; their logprobs differ."""
    completions = []
    for i, one in enumerate(group.group.completions):
        T = len(one.tokens)
        sampled = rng.random(T) < 0.6
        sampled[rng.integers(T)] = True
        if 0 < i == len(group.group.completions) - 1:
            sampled[:] = False
        logprobs = np.where(sampled, np.array(one.logprobs) + rng.normal(0, 0.2, T), 0.0)
        completions.append(replace(one, sampled=tuple(sampled.tolist()), logprobs=tuple(logprobs.tolist())))
    return with_completions(group, completions)


def random_teacher(
    completion: Completion, vocab_size: int, rng: np.random.Generator, *, alternatives: int
) -> TeacherTokens:
    """Some tokens, each once, with log-probabilities that leave something for all others."""
    T = len(completion.tokens)
    tokens = [rng.permutation(vocab_size)[:alternatives] for _ in range(T)]
    logprobs = np.log(rng.dirichlet(np.ones(alternatives + 1), size=T)[:, :alternatives])
    return TeacherTokens(
        tokens=tuple(tuple(row.tolist()) for row in tokens), logprobs=tuple(tuple(row) for row in logprobs.tolist())
    )


def random_supports(completion: Completion, vocab_size: int, rng: np.random.Generator) -> Completion:
    """Return the completion with a random support for each sampled token, which contains the token."""
    sampled = completion.sampled or (True,) * len(completion.tokens)
    supports = [
        np.union1d(rng.permutation(vocab_size)[:3], [token]).astype("<u4").tobytes() if yes else b""
        for token, yes in zip(completion.tokens, sampled, strict=True)
    ]
    return replace(completion, supports=tuple(supports))


def environment_groups(vocab_size: int, *, groups: int = 4, seed: int = 0) -> list[ScoredGroup]:
    """Return groups of four with everything that an environment may send.

    All have masks and references. In turn: temperatures and a zero_advantage completion; teachers of three or of two
    alternatives beside supports; advantages per token for the second.
    """
    rng = np.random.default_rng(seed)
    made = []
    for g, plain in enumerate(random_groups(vocab_size, groups=groups, seed=seed)):
        group = masked(plain, rng)
        completions = group.group.completions
        fields: dict[str, Any] = {
            "reference_logprobs": tuple(tuple(rng.uniform(-3, -0.5, len(c.tokens)).tolist()) for c in completions)
        }
        if g % 2 == 0:
            fields["temperatures"] = tuple(rng.uniform(0.6, 1.4, len(completions)).tolist())
            fields["zero_advantage"] = (True, *[False] * (len(completions) - 1))
        if g == 1:
            fields["token_advantages"] = tuple(tuple(rng.normal(size=len(c.tokens)).tolist()) for c in completions)
        if g % 4 in (1, 2, 3):
            fields["teacher"] = tuple(random_teacher(c, vocab_size, rng, alternatives=2 + g % 2) for c in completions)
        if g % 4 in (0, 2):
            completions = tuple(random_supports(c, vocab_size, rng) for c in completions)
        made.append(with_completions(group, completions, **fields))
    return made
