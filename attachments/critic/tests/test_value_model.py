"""The critic: its loss and gradient against float64, what it learns, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from attachments.critic.critic import BIAS, HEAD, CriticUpdates, ValueModel, value_loss
from attachments.critic.sections import ValueHead
from clotho.models.parameters import flat
from clotho.models.policy import Policy
from clotho.models.turns import UNDIVIDED
from protocols.rollout import ScoredGroup
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import random_groups, tiny_policy

pytestmark = pytest.mark.needs_float32


def critic(policy: Policy | None = None, *, learner: Mapping[str, Any] | None = None, **keys: Any) -> CriticUpdates:
    """Return the critic of a tiny policy, whose learner has these settings."""
    settings = ValueHead(**{"warmup_steps": 0, "learning_rate": 1e-2, **keys})
    section = learner_settings(**{"layout": "padded", "micro_batch_tokens": 64, **(learner or {})})
    model = ValueModel(policy or tiny_policy(), settings, section, UNDIVIDED)
    return CriticUpdates(model, settings, section, max_tokens=16, turns=UNDIVIDED)


@pytest.mark.parametrize("value_clip", [0.0, 0.2])
def test_value_loss_and_gradient_are_those_of_float64(value_clip: float) -> None:
    """To 1e-6, with values inside and outside of the clip range; the gradient by central differences."""
    rng = np.random.default_rng(1)
    value_N, before_N, return_N = rng.normal(size=(3, 40)) * 0.4
    weight_N = rng.uniform(size=40) * (rng.random(40) < 0.9)

    def slow(value_N: np.ndarray) -> float:
        total = 0.0
        for value, before, target, weight in zip(value_N, before_N, return_N, weight_N, strict=True):
            near = before + min(max(value - before, -value_clip), value_clip) if value_clip else value
            total += 0.5 * weight * max((value - target) ** 2, (near - target) ** 2)
        return total

    def fast(value_N: mx.array) -> mx.array:
        before, target, weight = (mx.array(one.astype(np.float32)) for one in (before_N, return_N, weight_N))
        return value_loss(value_N, before, target, weight, value_clip=value_clip)

    loss, slope_N = mx.value_and_grad(fast)(mx.array(value_N.astype(np.float32)))
    assert float(np.array(loss)) == pytest.approx(slow(value_N), abs=1e-6)
    step = 1e-5 * np.eye(40)
    expected_N = [(slow(value_N + one) - slow(value_N - one)) / 2e-5 for one in step]
    np.testing.assert_allclose(np.array(slope_N), expected_N, atol=1e-6)


def test_the_gradient_of_the_head_is_that_of_its_hidden_states() -> None:
    """With a head of zeros all values are 0, so that the gradient of the head is -sum of c R h, in float64."""
    policy, groups = tiny_policy(), random_groups(32)
    one = critic(policy, value_clip=0.0)
    mini = one._dealt(groups)
    assert mini is not None
    micro = mini.micro_batches[0]
    return_N = np.random.default_rng(0).normal(size=micro.table.target_N.size).astype(np.float32)
    weight_N = (micro.table.loss_mask_N / 7).astype(np.float32)
    value_N = one._model.values(micro)
    _, gradient = one._model.gradient(micro, value_N, mx.array(return_N), mx.array(weight_N))
    hidden_N_D = np.array(one._model._forcing.hidden(micro), dtype=np.float64)
    assert np.array(value_N).tolist() == [0.0] * len(return_N)
    np.testing.assert_allclose(gradient[HEAD], -(weight_N * return_N) @ hidden_N_D, atol=1e-5)
    np.testing.assert_allclose(gradient[BIAS], -np.sum(weight_N * return_N), atol=1e-6)


def rewarded(seed: int) -> list[ScoredGroup]:
    """Return groups whose reward is 1 if their prompt ends with one of the first tokens, else 0."""
    found = []
    for group in random_groups(32, groups=8, size=2, seed=seed):
        reward = float(group.group.prompt.tokens[-1] < 16)
        found.append(replace(group, rewards=(reward,) * len(group.rewards)))
    return found


def test_the_critic_learns_what_completions_earn() -> None:
    """Its values explain the returns of prompts that it sees again and again, and the policy stays as it is."""
    policy = tiny_policy()
    before = {name: np.array(array) for name, array in flat(policy.trainable()).items()}
    one = critic(policy, gae_lambda=1.0, epochs=4, learning_rate=2e-2)
    explained, losses = [], []
    for seed in range(14):
        one.judged(rewarded(seed % 2))
        found = one.metrics()
        explained.append(found["critic/explained_variance"])
        losses.append(found["critic/value_loss"])
    assert np.mean(explained[-5:]) > 0.3 > np.mean(explained[:2])
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:2])
    assert all(np.array_equal(array, before[name]) for name, array in flat(policy.trainable()).items())


def test_the_value_loss_is_the_mean_over_tokens_before_the_first_step() -> None:
    """At the start all values are 0, so that it is half the mean square of the returns, whatever the epochs."""
    groups = rewarded(0)
    sizes, rewards = np.array([(len(c.tokens), g.rewards[0]) for g in groups for c in g.group.completions]).T
    one = critic(gae_lambda=1.0, epochs=2)
    one.judged(groups)
    assert one.metrics()["critic/value_loss"] == pytest.approx(0.5 * sizes @ np.square(rewards) / sizes.sum())
    assert one._model._optimizer.step == 2, "one step per epoch"


def test_the_critic_learns_the_whole_batch_at_its_own_rate() -> None:
    """Minibatches and the LoRA+ ratio of the policy's learner change nothing, also once the head is not zero."""
    ones = [critic(learner=keys) for keys in ({}, {"num_minibatches": 2, "lora_plus": 16.0})]
    judged = [[one.judged(rewarded(0)) for _ in range(3)][-1] for one in ones]
    assert [g.token_advantages for g in judged[0]] == [g.token_advantages for g in judged[1]]


def test_the_gradient_of_the_critic_is_clipped_to_the_norm_of_the_learner() -> None:
    """Adam's first step has the size of the learning rate, unless the clipped gradient is far below its epsilon."""
    one = critic(learner={"max_grad_norm": 1e-12})
    before = flat(one._model.arrays())
    one.judged(rewarded(0))
    assert all(np.allclose(array, before[name], atol=1e-4) for name, array in one._model._parameters.items())


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    """The step is left out."""
    model = critic()._model
    before = {name: np.array(array) for name, array in model.arrays().items()}
    gradient = {name: mx.zeros_like(array) for name, array in model._parameters.items()}
    assert not model.step(gradient | {BIAS: mx.array([np.nan])})
    assert all(np.array_equal(array, before[name]) for name, array in model.arrays().items())


def test_the_critic_learns_three_times_as_fast_as_the_policy() -> None:
    """Unless the settings say how fast."""
    rate = learner_settings().optimizer.highest_rate
    first, second, slower = (critic(learning_rate=one) for one in (None, 3 * rate, rate))
    for one in (first, second, slower):
        one.judged(rewarded(0))
    biases = [np.array(one.part().arrays[BIAS]).item() for one in (first, second, slower)]
    assert biases[0] == biases[1]
    assert biases[0] == pytest.approx(3 * biases[2], rel=1e-3)


def test_tokens_get_advantages_after_the_warm_up() -> None:
    """Until then groups stay as they are. Advantages of the batch have mean 0 and deviation 1."""
    one, groups = critic(warmup_steps=2), rewarded(0)
    assert [one.judged(groups) is groups for _ in range(3)] == [True, True, False]
    judged = one.judged(groups)
    rows = [row for group in judged for row in group.token_advantages]
    assert [len(row) for row in rows] == [len(c.tokens) for group in groups for c in group.group.completions]
    whole = np.concatenate(rows)
    assert (whole.mean(), whole.std()) == pytest.approx((0.0, 1.0), abs=1e-6)


def test_tokens_of_others_have_no_advantage_and_no_value() -> None:
    """What an environment has written is context."""
    (group,) = random_groups(32, groups=1, size=1, seed=4)
    (completion,) = group.group.completions
    sampled = tuple(t % 2 == 0 for t in range(len(completion.tokens)))
    group = replace(group, group=replace(group.group, completions=(replace(completion, sampled=sampled),)))
    (judged,) = critic(gae_lambda=0.5).judged([group])
    assert [advantage == 0.0 for advantage in judged.token_advantages[0]] == [not one for one in sampled]


def test_a_restored_critic_goes_on_bit_for_bit() -> None:
    """With weights, optimizer and number of batches; one of another policy is refused."""
    one, other = critic(warmup_steps=3), critic(warmup_steps=3)
    for seed in range(3):
        one.judged(rewarded(seed))
    other.restore(one.part())  # type: ignore[arg-type]
    first, second = (which.judged(rewarded(9)) for which in (one, other))
    assert [group.token_advantages for group in first] == [group.token_advantages for group in second]
    assert first[0].token_advantages
    with pytest.raises(ValueError, match="does not fit"):
        critic(tiny_policy(rank=2)).restore(one.part())  # type: ignore[arg-type]
