"""Groups whose completions have given importance weights under a bigram policy."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from clotho.training.batch import Division, Minibatch
from protocols.rollout import ScoredGroup
from tests.learner_settings import learner_settings
from tests.training.environment_groups import with_completions
from tests.training.policies_and_groups import Bigram, completion, scored_group


def logprobs(model: Bigram, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> mx.array:
    """Log-probabilities of tokens under a bigram model."""
    before = (*prompt, *tokens)[len(prompt) - 1 : -1]
    logits_T_V = model(mx.array(before))
    logp_T_V = logits_T_V - mx.logsumexp(logits_T_V, axis=-1, keepdims=True)
    return logp_T_V[mx.arange(len(tokens)), mx.array(tokens)]


def sampled_with(weights: list[list[float]], rewards: list[list[float]]) -> list[ScoredGroup]:
    """Groups whose completions have these importance weights under the initial bigram policy."""
    rng, model, groups = np.random.default_rng(2), Bigram(), []
    for number, (weights_G, rewards_G) in enumerate(zip(weights, rewards, strict=True)):
        tokens = [tuple(rng.integers(0, 5, length).tolist()) for length in rng.integers(2, 7, len(weights_G))]
        group = scored_group(tokens, rewards_G, group_id=number)
        completions = []
        for one, weight in zip(tokens, weights_G, strict=True):
            logp_T = np.array(logprobs(model, (1, 2), one), dtype=np.float64)
            completions.append(completion(one, (logp_T - math.log(weight) / len(one)).tolist()))
        groups.append(with_completions(group, completions))
    return groups


def split(groups: list[ScoredGroup], **keys: Any) -> tuple[Minibatch, ...]:
    """The minibatches of these groups."""
    advantages = [[np.ones(len(c.tokens)) for c in group.group.completions] for group in groups]
    settings = learner_settings(layout="padded", **keys)
    return Division(settings, 9, "padded").minibatches(groups, advantages)
