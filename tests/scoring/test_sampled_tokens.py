"""Tokens that the policy did not sample are read, but never trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from clotho.models.parameters import flat
from clotho.models.policy import Policy
from clotho.scoring.token_scores import SamplingDistribution
from clotho.training.update import Update
from protocols.rollout import ScoredGroup
from protocols.sampling import Completion
from tests import model_lanes
from tests.learner_settings import learner_settings
from tests.training.environment_groups import environment_groups, with_completions
from tests.training.policies_and_groups import (
    completion,
    learner,
    model_with,
    same_bits,
    scored_group,
    tiny_policy,
    whole_gradient,
)
from training_run.update_values import limited_k3

EVERYTHING: dict[str, Any] = {
    "kl_beta": 0.1,
    "reference": "environment",
    "entropy_weight": 0.05,
    "distillation_weight": 0.3,
}


def with_other_values_for_unsampled_tokens(group: ScoredGroup) -> ScoredGroup:
    """Return the same group with random values for all tokens that were not sampled."""

    def row(completion: Completion, values: Sequence[Any], nonsense: Any) -> tuple[Any, ...]:
        return tuple(v if yes else nonsense for v, yes in zip(values, completion.sampled, strict=True))

    before = group.group.completions
    completions = [
        replace(
            c,
            logprobs=row(c, c.logprobs, math.nan),
            versions=row(c, c.versions, 7),
            supports=row(c, c.supports, np.array([1], "<u4").tobytes()) if c.supports else (),
        )
        for c in before
    ]
    rows: dict[str, Any] = {
        name: tuple(row(c, one, math.nan) for c, one in zip(before, getattr(group, name), strict=True))
        for name in ("token_advantages", "reference_logprobs")
        if getattr(group, name)
    }
    teacher = tuple(
        replace(one, tokens=row(c, one.tokens, ()), logprobs=row(c, one.logprobs, ()))
        for c, one in zip(before, group.teacher, strict=False)
    )
    return with_completions(group, completions, **rows, teacher=teacher)


@pytest.mark.parametrize("objective", ["grpo", "gspo", "dppo_tv"])
def test_values_of_unsampled_tokens_change_nothing(objective: str) -> None:
    """Log-probabilities, versions, advantages, reference, teacher and support: the update is bit-identical."""
    updates = []
    for groups in (
        environment_groups(32),
        [with_other_values_for_unsampled_tokens(group) for group in environment_groups(32)],
    ):
        one = learner(tiny_policy(), measure_update_kl=True, objective=objective, **EVERYTHING)
        updates.append(one.update(groups))
    assert updates[0].applied
    assert updates[0].metrics == updates[1].metrics
    assert updates[0].advantages == updates[1].advantages
    assert same_bits(updates[0].parameters, updates[1].parameters)


def two_turn_group(**fields: Any) -> ScoredGroup:
    """Return two completions of two turns: the policy sampled 3 4 and 5 of the first, 6 and 7 8 of the second."""
    first = replace(
        completion([3, 4, 20, 21, 5], [-1.5, -1.0, 0.0, 0.0, -2.0]), sampled=(True, True, False, False, True)
    )
    second = replace(
        completion([6, 22, 7, 8, 23], [-1.2, 0.0, -0.7, -3.0, 0.0]), sampled=(True, False, True, True, False)
    )
    return with_completions(scored_group([[3], [6]], [1.0, 0.0]), [first, second], **fields)


def naive_loss(policy: Policy, weights: dict[str, mx.array], group: ScoredGroup) -> mx.array:
    """Return the mean over the sampled tokens of -min(r A, clip(r) A) from whole logits, for differentiation by MLX."""
    policy.model.load_weights(list(weights.items()), strict=False)
    losses = []
    for i, c in enumerate(group.group.completions):
        tokens = (*group.group.prompt.tokens, *c.tokens)
        logits_S_V = policy.model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
        logp_S_V = logits_S_V - mx.logsumexp(logits_S_V, axis=-1, keepdims=True)
        for t in np.flatnonzero(c.sampled).tolist():
            logp = logp_S_V[len(group.group.prompt.tokens) + t - 1, c.tokens[t]]
            r, A = mx.exp(logp - c.logprobs[t]), (0.5 if i == 0 else -0.5) / (0.5 + 1e-4)
            losses.append(-mx.minimum(r * A, mx.clip(r, 0.8, 1.2) * A))
    return mx.mean(mx.stack(losses))


def nearly_on_policy(policy: Policy, group: ScoredGroup) -> ScoredGroup:
    """Return the same group with rollout log-probabilities that differ from the policy by at most a tenth of a nat."""
    completions = []
    for i, c in enumerate(group.group.completions):
        logprobs = np.zeros(len(c.tokens))
        own = reference_logprobs(policy, policy.trainable(), group, i)
        logprobs[np.flatnonzero(c.sampled)] = own + 0.1 * np.cos(np.arange(len(own)))
        completions.append(replace(c, logprobs=tuple(logprobs.tolist())))
    return with_completions(group, completions)


@pytest.mark.needs_float32
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_two_turns_of_a_transformer_equal_a_naive_evaluation(layout: Any) -> None:
    """Rewards 1 0: advantages +-1. The reference is MLX's derivative of the plain formula, to 1e-5 of its size."""
    policy = tiny_policy()
    group = nearly_on_policy(policy, two_turn_group())
    settings = learner_settings(loss_aggregation="token_mean", layout=layout)
    value, arrays = whole_gradient(policy, [group], settings, distribution=SamplingDistribution(1.0))
    weights = flat(policy.trainable())
    expected, slopes = mx.value_and_grad(lambda weights: naive_loss(policy, weights, group))(weights)
    assert value == pytest.approx(expected.item(), abs=1e-5)
    size = max(np.abs(np.array(slope)).max() for slope in slopes.values())
    assert size > 0.01
    for name, slope in slopes.items():
        np.testing.assert_allclose(arrays[name], np.array(slope), atol=1e-5 * size)


def test_unsampled_tokens_are_part_of_the_context() -> None:
    """Another answer of a tool changes the distributions after it."""
    other = two_turn_group()
    first, second = other.group.completions
    other = with_completions(other, [replace(first, tokens=(3, 4, 20, 9, 5)), second])
    one, two = (learner(tiny_policy()).update([group]) for group in (two_turn_group(), other))
    assert one.metrics.entropy != pytest.approx(two.metrics.entropy, abs=1e-4)


@pytest.mark.parametrize("loss_aggregation", ["token_mean", "sequence_mean", "token_sum", "group_mean"])
def test_a_completion_without_sampled_tokens_is_excluded(loss_aggregation: str) -> None:
    """Its reward counts in the mean of the group only, as that of an empty completion."""
    silent = replace(completion([5, 6], [0.0, 0.0]), sampled=(False, False))
    updates = []
    for third in (silent, completion([], [])):
        group = scored_group([[3, 4], [7], []], [1.0, 0.0, 0.5])
        group = with_completions(group, [*group.group.completions[:2], third])
        updates.append(learner(tiny_policy(), loss_aggregation=loss_aggregation).update([group]))
    assert updates[0].metrics == updates[1].metrics
    assert same_bits(updates[0].parameters, updates[1].parameters)
    assert updates[0].advantages == ((updates[1].advantages[0][0], updates[1].advantages[0][1], 0.0),)


def test_an_update_without_sampled_tokens_is_refused() -> None:
    """It has no gradient."""
    silent = replace(completion([5, 6], [0.0, 0.0]), sampled=(False, False))
    group = with_completions(scored_group([[5]], [1.0]), [silent])
    with pytest.raises(ValueError, match="at least one completion token"):
        learner(tiny_policy()).update([group])


def test_on_policy_metrics_use_only_sampled_tokens() -> None:
    """The mismatch is 0 if the sampler is the learner, for any version of unsampled tokens."""
    policy = tiny_policy()
    first, _ = two_turn_group().group.completions
    group = with_completions(two_turn_group(), [first, first])
    logprobs = np.zeros(len(first.tokens))
    logprobs[np.flatnonzero(first.sampled)] = reference_logprobs(policy, policy.trainable(), group, 0)
    one = replace(first, logprobs=tuple(logprobs.tolist()))
    group = with_completions(group, [one, one])
    metrics = learner(policy).update([group]).metrics
    assert metrics.mismatch_kl == pytest.approx(0.0, abs=model_lanes.atol(1e-6))
    assert (metrics.ratio_mean, metrics.ess) == pytest.approx((1.0, 1.0), abs=model_lanes.atol(1e-5))


def reference_logprobs(policy: Policy, parameters: Any, group: ScoredGroup, i: int) -> np.ndarray:
    """Return the log-probability of the sampled tokens of a completion at its temperature."""
    prompt, c = group.group.prompt.tokens, group.group.completions[i]
    model = model_with(policy, parameters)
    logits = model(mx.array([[*prompt, *c.tokens]]))[0, len(prompt) - 1 : -1].astype(mx.float32)
    logits = logits / (group.temperatures[i] if group.temperatures else 1.0)
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    logp_T = np.array(mx.take_along_axis(logp, mx.array(c.tokens)[:, None], axis=-1)[:, 0], dtype=np.float64)
    return logp_T[np.flatnonzero(c.sampled)]


@pytest.mark.parametrize("temperatures", [(), (0.7, 1.3)])
@pytest.mark.parametrize("budget", [1, 8192])
def test_the_update_kl_is_measured_on_sampled_tokens(budget: int, temperatures: tuple[float, ...]) -> None:
    """Before and after the update, at the sampling temperature."""
    policy, group = tiny_policy(), two_turn_group(temperatures=temperatures)
    update: Update = learner(policy, measure_update_kl=True, micro_batch_tokens=budget, learning_rate=0.1).update(
        [group]
    )
    ratio_N = np.concatenate(
        [
            reference_logprobs(policy, update.parameters, group, i)
            - reference_logprobs(policy, policy.trainable(), group, i)
            for i in (0, 1)
        ]
    )
    assert update.metrics.update_kl == pytest.approx(limited_k3(ratio_N).mean(), rel=model_lanes.rtol(1e-3))


def test_truncation_is_determined_by_the_finish_reason() -> None:
    """`mask_truncated` reads the finish reason, not the last token."""
    group = two_turn_group()
    first, second = group.group.completions
    cut = with_completions(group, [replace(first, finish_reason="length"), second])
    settings = learner_settings(mask_truncated=True)
    assert learner(tiny_policy(), mask_truncated=True).update([cut]).metrics.trained_tokens == 3
    assert whole_gradient(tiny_policy(), [cut], settings, distribution=SamplingDistribution(1.0))[0] > 0.1
