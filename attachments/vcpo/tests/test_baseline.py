"""Advantages over the baseline of least variance, by hand, against loops, and in updates."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from attachments.vcpo.baseline import log_variance_weights, optimal_baseline, score_norm_squared
from clotho.models.parameters import flat
from clotho.models.turns import UNDIVIDED
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.objectives import OptimalBaselineAdvantage
from clotho.training.batch import Minibatch
from clotho.training.gradient import LearnerModel, LossConfig
from clotho.training.objectives.functions import objective
from clotho.training.objectives.loss import LossCoefficients
from protocols.rollout import ScoredGroup
from tests import model_lanes
from tests.learner_settings import advantage, learner_settings
from tests.oracle.advantages import least_variance
from tests.training.environment_groups import with_completions
from tests.training.policies_and_groups import (
    Bigram,
    BigramPolicy,
    completion,
    learner,
    random_groups,
    scored_group,
    tiny_policy,
)
from tests.training.weighted_groups import logprobs, sampled_with, split


def settings_of(spread: str, epsilon: float) -> OptimalBaselineAdvantage:
    """Return those of the advantage."""
    settings = advantage("optimal_baseline", deviation=spread, epsilon=epsilon)
    assert isinstance(settings, OptimalBaselineAdvantage)
    return settings


@pytest.mark.parametrize(
    ("rewards", "weights", "expected"),
    [
        ([1.0, 0.0], [1.0, 1.0], [1.0, -1.0]),
        ([1.0, 0.0], [3.0, 1.0], [0.5, -1.5]),
        ([1.0, 0.0], [1.0, 0.0], [0.0, -2.0]),
        ([1.0, 0.0], [0.0, 0.0], [1.0, -1.0]),
        ([3.0, 3.0], [5.0, 1.0], [0.0, 0.0]),
        ([0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 1.0, 5.0], [-1.5, -1.5, 0.5, 0.5]),
    ],
)
def test_the_optimal_baseline_by_hand(rewards: list[float], weights: list[float], expected: list[float]) -> None:
    """Rewards 1 0 with weights 3 1: baseline 3/4, deviation 1/2. 0 0 4 4 with 1 1 1 5: baseline 3, deviation 2.

    A completion without a gradient has no part in the baseline; a group without any has the mean.
    """
    settings = settings_of("population", 1e-12)
    with np.errstate(divide="ignore"):
        logs = [np.log(np.array(weights)) + shift for shift in (0.0, 900.0, -900.0)]
    for log_G in logs:
        found = optimal_baseline(settings, np.array(rewards), log_G)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def test_a_weight_that_is_no_number_makes_the_advantages_of_its_group_none() -> None:
    """Other groups keep theirs; the update is then rejected as a whole."""
    settings = settings_of("population", 1e-12)
    spoilt, fine = (
        optimal_baseline(settings, np.array([1.0, 0.0]), np.array(logs)) for logs in ([math.nan, 0.0], [0.0, 0.0])
    )
    assert np.isnan(spoilt).all()
    np.testing.assert_allclose(fine, [1.0, -1.0])


@pytest.mark.parametrize("spread", ["population", "sample"])
def test_the_baseline_of_least_variance_equals_the_loops(spread: str) -> None:
    """For weights of all sizes."""
    rng = np.random.default_rng(4)
    rewards = [rng.normal(size=size) for size in (4, 6, 2)]
    logs = [3.0 * rng.normal(size=one.size) for one in rewards]
    settings = settings_of(spread, 1e-3)
    for reward_G, log_G in zip(rewards, logs, strict=True):
        one = optimal_baseline(settings, reward_G, log_G)
        expected = least_variance(reward_G.tolist(), np.exp(log_G).tolist(), spread=spread, epsilon=1e-3)
        np.testing.assert_allclose(one, expected, rtol=1e-10, atol=1e-12)


VCPO: dict[str, Any] = {
    "objective": "reinforce",
    "correction": "truncate_sequence",
    "correction_high": 8.0,
    "advantage": "optimal_baseline",
    "step_scale": "ess",
}


def test_the_weights_of_the_baseline_by_hand() -> None:
    """log w^2 n with n the number of tokens, the sum of (1 - p)^2, or 1 if the exact norm is added."""
    weights = [[2.0, 0.5, 1.0], [4.0, 1.0]]
    groups = sampled_with(weights, [[1.0, 0.0, 0.0], [0.0, 1.0]])
    for budget in (8, 1000):
        minis = split(groups, micro_batch_tokens=budget)
        rows = [[scored(groups, mini, m) for m in range(len(mini.micro_batches))] for mini in minis]
        for norm in ("length", "probabilities", "exact"):
            found = log_variance_weights(groups, minis, rows, gradient_norm=norm)
            for group, log_G, weights_G in zip(groups, found, weights, strict=True):
                for one, log_weight, weight in zip(group.group.completions, log_G, weights_G, strict=True):
                    p_T = np.exp(np.array(logprobs(Bigram(), (1, 2), one.tokens), dtype=np.float64))
                    n = {"length": len(p_T), "probabilities": ((1 - p_T) ** 2).sum(), "exact": 1.0}[norm]
                    assert log_weight == pytest.approx(math.log(weight**2 * n), abs=1e-5)


def test_a_completion_whose_tokens_were_certain_has_no_part_in_the_baseline() -> None:
    """Its gradient is zero, and the logarithm of its weight minus infinity."""
    groups = sampled_with([[1.0, 1.0]], [[1.0, 0.0]])
    minis = split(groups, micro_batch_tokens=1000)
    rows = [[mx.zeros(len(micro.table.target_N)) for micro in mini.micro_batches] for mini in minis]
    found = log_variance_weights(groups, minis, rows, gradient_norm="probabilities")
    assert [log_G.tolist() for log_G in found] == [[-math.inf, -math.inf]]


def scored(groups: list[ScoredGroup], mini: Minibatch, number: int) -> mx.array:
    """Log-probabilities of the tokens of a micro-batch under the initial bigram policy, padding included."""
    micro = mini.micro_batches[number]
    found = []
    for member in micro.members:
        group, i = mini.origins[member]
        found.append(logprobs(Bigram(), (1, 2), groups[group].group.completions[i].tokens))
    row_N = mx.concatenate(found)
    return mx.concatenate([row_N, mx.full((len(micro.table.target_N) - row_N.size,), 7.0)])


def test_completions_that_are_not_trained_on_have_no_part_in_the_baseline() -> None:
    """Truncated completions have weight 0; the reward of the other one is the baseline."""
    (group,) = sampled_with([[1.0, 1.0]], [[1.0, 0.0]])
    first, second = group.group.completions
    group = with_completions(group, [first, replace(second, finish_reason="length")])
    update = learner(BigramPolicy(), mask_truncated=True, advantage="optimal_baseline").update([group])
    assert update.advantages[0][0] == 0.0
    assert update.advantages[0][1] == pytest.approx(-2.0, rel=1e-3)


def test_the_exact_norm_is_that_of_the_gradient_of_the_log_probability() -> None:
    """Of all trainable parameters, against the gradient of the plain model."""
    policy = BigramPolicy()
    group = scored_group([[3, 4, 0, 3]], [1.0])
    ((mini,),) = (split([group]),)
    settings = learner_settings(kl_beta=0.3, distillation_weight=0.2)
    config = LossConfig(settings, objective(settings.objective), LossCoefficients(1, 1))
    forcing = TeacherForcing(policy.model, policy.vocab_size, layout="padded")
    computing = LearnerModel(policy, forcing, SamplingDistribution(1.0, ()), UNDIVIDED)
    found = score_norm_squared(computing, policy.trainable(), mini.micro_batches[0], config)
    model = Bigram()

    def log_probability(weights: dict[str, Any]) -> mx.array:
        model.update(weights)
        return mx.sum(logprobs(model, (1, 2), (3, 4, 0, 3)))

    weights = model.trainable_parameters()  # type: ignore[no-untyped-call]
    gradient = flat(mx.grad(log_probability)(weights))
    expected = sum(float(np.square(np.array(array, dtype=np.float64)).sum()) for array in gradient.values())
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_advantages_of_an_update_are_those_of_its_baseline() -> None:
    """Weights 3 1 with equal lengths by `length`: W 9 1, baseline 0.9, deviation 1/2, so 0.2 and -1.8."""
    (group,) = sampled_with([[3.0, 1.0]], [[1.0, 0.0]])
    first, second = group.group.completions
    same = min(len(first.tokens), len(second.tokens))
    model, rows = Bigram(), []
    for one, weight in ((first, 3.0), (second, 1.0)):
        logp_T = np.array(logprobs(model, (1, 2), one.tokens[:same]), dtype=np.float64)
        rows.append(completion(one.tokens[:same], (logp_T - math.log(weight) / same).tolist()))
    group = with_completions(group, rows)
    keys: dict[str, Any] = {"advantage": "optimal_baseline", "gradient_norm": "length"}
    update = learner(BigramPolicy(), **keys).update([group])
    np.testing.assert_allclose(update.advantages[0], [0.2, -1.8], rtol=2e-3)


@pytest.mark.parametrize("norm", ["probabilities", "exact"])
def test_the_split_into_micro_batches_does_not_change_an_update_with_variance_control(norm: str) -> None:
    """Groups are divided between micro-batches, and their baseline and the effective sample size stay."""
    keys: dict[str, Any] = {**VCPO, "gradient_norm": norm, "epsilon": 1e-3}
    updates = [
        learner(tiny_policy(), micro_batch_tokens=budget, **keys).update(random_groups(32)) for budget in (8192, 1)
    ]
    assert updates[0].metrics.step_scale < 0.99
    assert updates[1].metrics.step_scale == pytest.approx(updates[0].metrics.step_scale, rel=1e-4)
    for one, other in zip(*(update.advantages for update in updates), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    for name, value in flat(updates[0].parameters).items():
        found = np.array(flat(updates[1].parameters)[name])
        np.testing.assert_allclose(found, np.array(value), atol=2e-2 * model_lanes.rtol(1e-3))


def test_the_baseline_is_that_of_the_weights_at_the_start_for_every_step() -> None:
    """Two epochs with the policy at the start as reference: one scoring pass serves both."""
    keys: dict[str, Any] = {"advantage": "optimal_baseline", "ratio_reference": "batch_start"}
    first = learner(BigramPolicy(), **keys).update(random_groups(5))
    second = learner(BigramPolicy(), update_epochs=2, **keys).update(random_groups(5))
    assert second.metrics.optimizer_steps == 2
    for one, other in zip(first.advantages, second.advantages, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
