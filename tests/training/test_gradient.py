"""The gradient of a micro-batch."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import TrainablePolicy
from clotho.models.policy_model import WeightedModel
from clotho.models.turns import UNDIVIDED, TurnBudget
from clotho.scoring.sequences import MicroBatch
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.objectives import Objective
from clotho.training.batch import Division, UpdateStart, prepare
from clotho.training.gradient import FixedLogprobs, LearnerModel, LossConfig, MicroBatchGradient, StepPosition
from clotho.training.objectives.contract import Objective as ObjectiveFunction
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss
from clotho.training.objectives.functions import objective
from clotho.training.objectives.loss import initial_loss_coefficients
from clotho.training.reference_policy import ReferencePolicy
from protocols.rollout import ScoredGroup
from tests import model_lanes
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import (
    VOCAB,
    BigramPolicy,
    learner_model,
    model_with,
    random_groups,
    same_bits,
    scored_group,
    tiny_policy,
)


def gradients(
    policy: TrainablePolicy,
    groups: list[ScoredGroup],
    *,
    budget: int = 10_000,
    turns: TurnBudget = UNDIVIDED,
    **keys: Any,
) -> list[MicroBatchGradient]:
    """Gradients of every micro-batch of a batch, at the served parameters."""
    plain = {"loss_aggregation": "token_mean", "clip_high": 0.28, "layout": "padded", "micro_batch_tokens": budget}
    settings = learner_settings(**(plain | keys))
    loss_config = LossConfig(settings, objective(settings.objective), initial_loss_coefficients(settings))
    model = learner_model(policy, settings, SamplingDistribution(0.8))._replace(turns=turns)
    return [
        model.gradient(policy.trainable(), micro, known, loss_config=loss_config, position=StepPosition(0, 0.0))
        for micro, known in prepared(policy, groups, loss_config)
    ]


def prepared(
    policy: TrainablePolicy, groups: list[ScoredGroup], loss_config: LossConfig
) -> list[tuple[MicroBatch, FixedLogprobs]]:
    """The micro-batches of a batch, with what is known of each before its gradient."""
    settings = loss_config.settings
    model = learner_model(policy, settings, SamplingDistribution(0.8))
    division, reference = Division(settings, 100, model.forcing.layout), ReferencePolicy(policy, settings)
    batch = prepare(UpdateStart(groups, model, division, policy.trainable(), reference, loss_config))
    return list(zip(batch.minibatches[0].micro_batches, batch.fixed_logprobs[0], strict=True))


def total(gradient: MicroBatchGradient, metric: str) -> float:
    """Sum of a metric over the tokens."""
    return float(gradient.metrics[metric][0])


def vector(gradient: MicroBatchGradient) -> np.ndarray:
    """All of it as one vector, in float64."""
    return np.concatenate([np.array(array, dtype=np.float64).ravel() for array in gradient.arrays.values()])


def oracle(embed: np.ndarray, head: np.ndarray, groups: list[ScoredGroup], reference: np.ndarray) -> float:
    """The loss of a bigram model in float64 loops: clip [0.8, 1.28], k3 with 0.1, entropy bonus 0.05, T = 0.8."""
    total, count = 0.0, 0
    log_reference = [log_softmax(reference_V) for reference_V in reference]
    for g in groups:
        A_G = (np.array(g.rewards) - np.mean(g.rewards)) / (np.std(g.rewards) + 1e-4)
        for c, A in zip(g.group.completions, A_G, strict=True):
            tokens = (*g.group.prompt.tokens, *c.tokens)
            for (before, token), b in zip(list(pairwise(tokens))[-len(c.tokens) :], c.logprobs, strict=True):
                logp_V = log_softmax(embed[before] @ head.T / 0.8)
                rho = np.exp(logp_V[token] - b)
                J = min(rho * A, np.clip(rho, 0.8, 1.28) * A)
                d = log_reference[before][token] - logp_V[token]
                total += -J + 0.1 * (np.exp(d) - 1 - d) + 0.05 * (np.exp(logp_V) @ logp_V)
                count += 1
    return total / count


def log_softmax(z_V: np.ndarray) -> np.ndarray:
    """In float64."""
    logp_V: np.ndarray = z_V - np.log(np.exp(z_V).sum())
    return logp_V


def test_the_whole_gradient_equals_finite_differences_of_a_float64_oracle() -> None:
    """Every weight of a bigram model, through packing, temperature, clipping, penalty and bonus."""
    policy = BigramPolicy()
    groups = random_groups(5)
    reference = policy.copy_model()
    reference.use_reference()
    reference_V_V = np.array(reference.model(mx.arange(5)[None])[0], dtype=np.float64) / 0.8
    (gradient,) = gradients(policy, groups, kl_beta=0.1, entropy_weight=0.05)
    weights = {name: np.array(value, dtype=np.float64) for name, value in flat(policy.trainable()).items()}

    def loss(changed: dict[str, np.ndarray]) -> float:
        return oracle(changed["model.weight"], changed["lm_head.weight"], groups, reference_V_V)

    for name, value in weights.items():
        slopes = np.zeros_like(value)
        for index in np.ndindex(*value.shape):
            step = np.zeros_like(value)
            step[index] = 1e-6
            slopes[index] = (loss({**weights, name: value + step}) - loss({**weights, name: value - step})) / 2e-6
        np.testing.assert_allclose(np.array(gradient.arrays[name]), slopes, atol=2e-5)
    assert float(gradient.loss) == pytest.approx(loss(weights), abs=1e-6)


@pytest.mark.lanes(budget=(24,))
@pytest.mark.parametrize("budget", [1, 24, 64])
def test_any_split_into_micro_batches_gives_the_same_gradient(budget: int) -> None:
    """The denominator is the whole update's, so parts add up to the whole, and so do the metrics.

    To 2e-5 of the gradient's norm: float32 itself is off by up to 5e-6 here, whole or split (in float64 both agree to
    4e-16), while a mean of means, or one token more in the denominator, is off by more than 1e-2.
    """
    policy = tiny_policy()
    groups = random_groups(32)
    (whole,) = gradients(policy, groups, kl_beta=0.1, entropy_weight=0.05)
    parts = gradients(policy, groups, budget=budget, kl_beta=0.1, entropy_weight=0.05)
    assert len(parts) > 1
    expected = vector(whole)
    assert np.linalg.norm(sum(vector(part) for part in parts) - expected) < model_lanes.rtol(2e-5) * np.linalg.norm(
        expected
    )
    assert sum(float(part.loss) for part in parts) == pytest.approx(
        float(whole.loss), rel=model_lanes.rtol(1e-4), abs=model_lanes.atol(1e-4)
    )
    for name, sums in whole.metrics.items():
        added = np.sum([np.array(part.metrics[name]) for part in parts], axis=0)
        np.testing.assert_allclose(added, np.array(sums), rtol=model_lanes.rtol(1e-4), atol=model_lanes.atol(1e-4))


@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_only_the_adapter_is_differentiated(grad_checkpoint: bool) -> None:
    """No frozen weight has a gradient; every adapter weight does, and recomputing blocks does not change it."""
    plain, policy = tiny_policy(), tiny_policy(grad_checkpoint=grad_checkpoint)
    (gradient,) = gradients(policy, random_groups(32))
    assert gradient.arrays.keys() == flat(policy.trainable()).keys()
    assert all(".lora_" in name for name in gradient.arrays)
    assert all(np.abs(np.array(g)).max() > 0 for name, g in gradient.arrays.items() if name.endswith("lora_b"))
    (expected,) = gradients(plain, random_groups(32))
    assert np.linalg.norm(vector(gradient) - vector(expected)) < model_lanes.rtol(2e-5) * np.linalg.norm(
        vector(expected)
    )


class BrokenObjectiveError(Exception):
    """Raised by an objective function."""


def gradient_with(
    model: WeightedModel, parameters: Parameters, micro: MicroBatch, known: FixedLogprobs, function: ObjectiveFunction
) -> MicroBatchGradient:
    """Return the gradient of a micro-batch for an objective function."""
    settings = learner_settings(layout="padded")
    forcing = TeacherForcing(model.model, model.vocab_size)
    return LearnerModel(model, forcing, SamplingDistribution(1.0), UNDIVIDED).gradient(
        parameters,
        micro,
        known,
        loss_config=LossConfig(settings, function, initial_loss_coefficients(settings)),
        position=StepPosition(0, 0.0),
    )


def first_micro_batch(policy: TrainablePolicy) -> tuple[MicroBatch, FixedLogprobs]:
    """Return the first micro-batch of random groups."""
    settings = learner_settings(layout="padded")
    loss_config = LossConfig(settings, objective(settings.objective), initial_loss_coefficients(settings))
    return prepared(policy, random_groups(VOCAB), loss_config)[0]


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_gradient_the_model_has_its_parameters_and_no_tracer(*, fails: bool) -> None:
    """Also after an exception while the loss is traced: the arrays are those given, and the mode is evaluation."""
    policy = tiny_policy(dropout=0.3, grad_checkpoint=True)
    model = policy.copy_model()
    parameters = nested({name: value + 0.1 for name, value in flat(policy.trainable()).items()})

    def function(logp_N: mx.array, tokens: ObjectiveInputs, settings: Objective) -> PolicyLoss:
        if fails:
            raise BrokenObjectiveError
        return objective(settings)(logp_N, tokens, settings)

    micro, known = first_micro_batch(policy)
    with pytest.raises(BrokenObjectiveError) if fails else nullcontext():
        gradient_with(model, parameters, micro, known, function)
    assert not any(module.training for _, module in model.model.named_modules())
    assert all(flat(model.model.trainable_parameters())[name] is array for name, array in flat(parameters).items())
    tokens = mx.array([[1, 2, 3, 4]])
    expected = model_with(policy, parameters)(tokens)
    assert model_lanes.numpy(model.model(tokens)).tobytes() == model_lanes.numpy(expected).tobytes()


def test_dropout_draws_during_the_gradient_only() -> None:
    """Two gradients of the same batch differ with dropout and are equal without."""
    for dropout, equal in ((0.0, True), (0.5, False)):
        policy = tiny_policy(dropout=dropout)
        (one,), (other,) = gradients(policy, random_groups(32)), gradients(policy, random_groups(32))
        assert same_bits(one.arrays, other.arrays) is equal


def test_the_penalty_is_towards_the_policy_without_its_adapter() -> None:
    """At the start the adapter adds nothing, so KL and its k3 gradient are zero; a moved adapter has both."""
    policy = tiny_policy()
    still = [scored_group([[3, 4, 5], [6, 7]], [1.0, 1.0])]
    (gradient,) = gradients(policy, still, kl_beta=1.0)
    assert abs(total(gradient, "kl")) < 1e-6
    moved = {name: value + 0.1 for name, value in flat(policy.trainable()).items()}
    policy.publish(nested(moved), version=1, step=1, fingerprint="moved")
    (gradient,) = gradients(policy, still, kl_beta=1.0)
    assert total(gradient, "kl") > 1e-3
    assert max(np.abs(np.array(g)).max() for g in gradient.arrays.values()) > 1e-3
