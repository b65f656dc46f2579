"""Updates from stale rollouts (VCPO): the step scale and the baseline of least variance."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from clotho.models.parameters import flat
from clotho.models.turns import UNDIVIDED
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.training.batch import Division, Minibatch, log_variance_weights
from clotho.training.gradient import LearnerModel, LossConfig
from clotho.training.objectives.functions import objective
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizer_steps import effective_sample_size, step_scale
from protocols.rollout import ScoredGroup
from tests import model_lanes
from tests.learner_settings import learner_settings
from tests.training.environment_groups import with_completions
from tests.training.policies_and_groups import (
    Bigram,
    BigramPolicy,
    completion,
    learner,
    random_groups,
    same_bits,
    scored_group,
    tiny_policy,
)

VCPO: dict[str, Any] = {
    "objective": "reinforce",
    "correction": "truncate_sequence",
    "correction_high": 8.0,
    "advantage": "optimal_baseline",
    "step_scale": "ess",
}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1.0, 1.0, 1.0, 1.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([3.0, 1.0], 0.8), ([2.0], 1.0), ([], 1.0)],
)
def test_the_effective_sample_size_by_hand(weights: list[float], expected: float) -> None:
    """Weights 3 1: 16 / (2 x 10). A common factor, however large or small, changes nothing."""
    with np.errstate(divide="ignore"):
        log_M = np.log(np.array(weights))
    for shift in (0.0, 2000.0, -2000.0):
        assert effective_sample_size(log_M + shift) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_no_number_has_no_sample_size(bad: float) -> None:
    """Nor a scale: the update is rejected instead of taken at the full rate."""
    sample_size = effective_sample_size(np.array([0.0, bad]))
    assert math.isnan(sample_size)
    assert math.isnan(step_scale(sample_size, learner_settings(step_scale="ess")))


def test_the_scale_is_a_power_of_the_sample_size_over_its_base() -> None:
    """The square root by default; at the base and above it the rate is whole; without scaling it always is."""
    assert step_scale(0.25, learner_settings(step_scale="ess")) == 0.5
    assert step_scale(0.25, learner_settings(step_scale="ess", exponent=1.0)) == 0.25
    assert step_scale(0.25, learner_settings(step_scale="ess", base=0.5)) == pytest.approx(0.5**0.5)
    assert step_scale(0.5, learner_settings(step_scale="ess", base=0.5)) == 1.0
    assert step_scale(0.9, learner_settings(step_scale="ess", base=0.5)) == 1.0
    assert step_scale(0.25, learner_settings()) == 1.0


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


@pytest.mark.parametrize("scale", ["off", "ess"])
def test_the_learning_rate_of_a_step_is_scaled_by_the_completions_that_count(scale: str) -> None:
    """Weights 3 1 in two groups: 64 / (4 x 20) = 0.8. A first step of SGD is the square root of it as long."""
    groups = sampled_with([[3.0, 1.0], [1.0, 3.0]], [[1.0, 0.0], [0.0, 1.0]])
    policy, other = BigramPolicy(), BigramPolicy()
    keys: dict[str, Any] = {"optimizer": "sgd", "max_grad_norm": 0.0, "momentum": 0.0}
    one, full = learner(policy, step_scale=scale, **keys), learner(other, **keys)
    found, whole = one.update(groups), full.update(groups)
    factor = math.sqrt(0.8) if scale == "ess" else 1.0
    assert found.metrics.completion_ess == pytest.approx(0.8, rel=1e-4)
    assert found.metrics.step_scale == pytest.approx(factor, rel=1e-4)
    assert found.metrics.learning_rate == whole.metrics.learning_rate == 1e-2
    for name, start in flat(policy.trainable()).items():
        step, reference = (np.array(flat(u.parameters)[name] - start, dtype=np.float64) for u in (found, whole))
        np.testing.assert_allclose(step, factor * reference, rtol=2e-3, atol=1e-7)


def test_weights_count_by_completion_and_not_by_token() -> None:
    """Token weights that cancel within a completion leave its weight at 1."""
    (group,) = sampled_with([[1.0, 1.0]], [[1.0, 0.0]])
    first, second = group.group.completions
    shifted = tuple(logp + (3.0 if t == 0 else -3.0 if t == 1 else 0.0) for t, logp in enumerate(first.logprobs))
    group = with_completions(group, [replace(first, logprobs=shifted), second])
    metrics = learner(BigramPolicy()).update([group]).metrics
    assert metrics.completion_ess == pytest.approx(1.0, abs=1e-4)
    assert metrics.ess < 0.9


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
    found = computing.score_norm_squared(policy.trainable(), mini.micro_batches[0], config)
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


def test_a_recorded_log_probability_that_is_no_number_rejects_the_update() -> None:
    """Also where the loss itself does not use it."""
    one = learner(tiny_policy(), objective="grpo", ratio_reference="batch_start", step_scale="ess")
    before = one.parameters
    spoilt = one.update([scored_group([[3, 4], [5, 6]], [1.0, 0.0], logprob=math.nan)])
    assert (spoilt.applied, spoilt.finite) == (False, False)
    assert same_bits(one.parameters, before)


def test_the_baseline_is_that_of_the_weights_at_the_start_for_every_step() -> None:
    """Two epochs with the policy at the start as reference: one scoring pass serves both."""
    keys: dict[str, Any] = {"advantage": "optimal_baseline", "ratio_reference": "batch_start"}
    first = learner(BigramPolicy(), **keys).update(random_groups(5))
    second = learner(BigramPolicy(), update_epochs=2, **keys).update(random_groups(5))
    assert second.metrics.optimizer_steps == 2
    for one, other in zip(first.advantages, second.advantages, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
