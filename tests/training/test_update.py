"""Policy updates: all or nothing, in turns, and learning."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import json
from msgspec.structs import replace

from bench.graph_counts import GraphCounts, count
from clotho.lanes.arbiter import WorkCancelled
from clotho.models.parameters import flat
from clotho.models.policy import Policy
from clotho.training.gradient import LearnerModel, MicroBatchGradient
from clotho.training.update import Update
from protocols.rollout import ScoredGroup
from tests import model_lanes
from tests.recorded_turns import RecordedTurns
from tests.training.policies_and_groups import (
    BigramPolicy,
    completion,
    largest_difference,
    learner,
    random_groups,
    same_bits,
    scored_group,
    tiny_policy,
)


@pytest.mark.lanes
def test_an_update_makes_new_parameters_and_leaves_the_served_ones() -> None:
    """Nothing serves the new weights before somebody publishes them; their fingerprint and version are new."""
    policy = tiny_policy()
    served = policy.trainable()
    update = learner(policy).update(random_groups(32))
    assert update.applied
    assert update.finite
    assert update.version == 1
    assert update.fingerprint != policy.fingerprint
    assert not same_bits(update.parameters, served)
    assert same_bits(policy.trainable(), served)
    assert policy.version == 0


def test_the_next_update_starts_from_the_newest_parameters_served_or_not() -> None:
    """Whether or not the first update was published, the second one ends at the same weights."""
    results = []
    for publish in (False, True):
        policy = tiny_policy()
        one = learner(policy)
        first = one.update(random_groups(32))
        if publish:
            policy.publish(first.parameters, version=1, step=1, fingerprint=first.fingerprint)
        results.append(one.update(random_groups(32, seed=1)))
    assert same_bits(results[0].parameters, results[1].parameters)
    assert results[0].version == results[1].version == 2


@pytest.mark.lanes("bfloat16")
def test_an_update_never_changes_what_is_served() -> None:
    """Decode steps run between its turns; also when new weights are published in the middle of an update."""
    policy = tiny_policy(dropout=0.2)
    tokens = mx.array([[1, 2, 3, 4]])
    first: Update | None = None
    expected = model_lanes.numpy(policy.model(tokens))

    def between(number: int) -> None:
        nonlocal expected
        assert not policy.model.training
        assert model_lanes.numpy(policy.model(tokens)).tobytes() == expected.tobytes()
        if first is not None and policy.version == 0 and number > 1:
            policy.publish(first.parameters, version=1, step=1, fingerprint=first.fingerprint)
            expected = model_lanes.numpy(policy.model(tokens))

    lane = RecordedTurns(between)
    one = learner(policy, micro_batch_tokens=24, lane=lane)
    first = one.update(random_groups(32))
    lane.pauses = 0
    one.update(random_groups(32, seed=1))
    assert policy.version == 1
    assert lane.pauses > 3


def test_the_gradient_norm_is_that_of_a_step_of_sgd_per_learning_rate() -> None:
    """Without clipping and momentum."""
    model_lanes.skip_quantized()
    policy = tiny_policy()
    start = flat(policy.trainable())
    update = learner(policy, optimizer="sgd", max_grad_norm=0.0, momentum=0.0, learning_rate=1.0).update(
        random_groups(32)
    )
    steps = [np.array(array - start[name], dtype=np.float64) for name, array in flat(update.parameters).items()]
    norm = math.sqrt(sum(float((step**2).sum()) for step in steps))
    assert update.metrics.grad_norm == pytest.approx(norm, rel=model_lanes.rtol(1e-3))
    assert norm > 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_bit_equal(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad number in one of many micro-batches: skipped as a whole; what follows is as if it had not been."""
    learners = [learner(tiny_policy(), micro_batch_tokens=24) for _ in range(2)]
    for one in learners:
        one.update(random_groups(32))
    before, state = learners[0].parameters, learners[0].state()
    with monkeypatch.context() as patch:
        patch.setattr(LearnerModel, "gradient", poisoned(bad, number=2))
        skipped = learners[0].update(random_groups(32, seed=1))
    assert not any((skipped.applied, skipped.finite, skipped.metrics.update_applied))
    assert (skipped.version, skipped.fingerprint) == (learners[1].version, learners[1].fingerprint)
    assert same_bits(skipped.parameters, before)
    assert same_bits(learners[0].state(), state)
    updates = [one.update(random_groups(32, seed=2)) for one in learners]
    assert same_bits(updates[0].parameters, updates[1].parameters)
    assert same_bits(learners[0].state(), learners[1].state())


def poisoned(bad: float, *, number: int) -> Callable[..., MicroBatchGradient]:
    """`LearnerModel.gradient` with one bad number in the last array of its result number `number`."""
    computed, calls = LearnerModel.gradient, itertools.count(1)

    def gradient(*args: Any, **kwargs: Any) -> MicroBatchGradient:
        found = computed(*args, **kwargs)
        if next(calls) != number:
            return found
        name = max(found.arrays)
        array = np.array(found.arrays[name])
        array.flat[-1] = bad
        return found._replace(arrays=found.arrays | {name: mx.array(array)})

    return gradient


def test_nonsense_from_a_sampler_never_reaches_the_weights() -> None:
    """A recorded log-probability that is not a number makes the loss one too: skipped, and said so."""
    one = learner(tiny_policy())
    before, state = one.parameters, one.state()
    skipped = one.update([scored_group([[3, 4], [5, 6]], [1.0, 0.0], logprob=math.nan)])
    assert not any((skipped.applied, skipped.finite))
    assert math.isnan(skipped.metrics.loss)
    assert same_bits(one.parameters, before)
    assert same_bits(one.state(), state)


def test_steps_without_a_gradient_are_not_counted() -> None:
    """Of two mini-batches one teaches nothing; two epochs take two steps, and an update that is skipped takes none."""
    keys: dict[str, Any] = {"num_minibatches": 2, "update_epochs": 2}
    groups = [scored_group([[3, 4], [5, 6]], rewards, group_id=i) for i, rewards in enumerate([(1.0, 0.0), (0.1, 0.1)])]
    metrics = learner(tiny_policy(), **keys).update(groups).metrics
    assert (metrics.optimizer_steps, metrics.update_applied) == (2, True)
    metrics = learner(tiny_policy(), **keys).update(groups[1:]).metrics
    assert (metrics.optimizer_steps, metrics.update_applied) == (0, False)


def test_equal_rewards_teach_nothing() -> None:
    """A gradient of exactly zero is not a step: Adam would turn old momentum into one."""
    one = learner(tiny_policy())
    one.update(random_groups(32))
    before, state = one.parameters, one.state()
    update = one.update([scored_group([[3, 4], [5, 6]], [0.1, 0.1])])
    assert not update.applied
    assert update.finite
    assert update.version == 1
    assert update.metrics.grad_norm == 0.0
    assert same_bits(update.parameters, before)
    assert same_bits(one.state(), state)


def test_a_cancelled_update_changes_nothing() -> None:
    """Cancelled between two micro-batches, it leaves no trace: the next update is that of a learner without it."""

    def cancel(number: int) -> None:
        if number == 1:
            raise WorkCancelled

    one = learner(tiny_policy(), micro_batch_tokens=24, lane=RecordedTurns(cancel))
    before, state = one.parameters, one.state()
    with pytest.raises(WorkCancelled):
        one.update(random_groups(32))
    assert same_bits(one.parameters, before)
    assert same_bits(one.state(), state)
    other = learner(tiny_policy(), micro_batch_tokens=24)
    assert same_bits(one.update(random_groups(32)).parameters, other.update(random_groups(32)).parameters)


@pytest.mark.lanes("bfloat16", kind=("lora",))
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_restored_learner_continues_bit_for_bit(kind: str) -> None:
    """Weights and optimizer state of a checkpoint are all there is: update 3 is the same in another process."""
    keys: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 1, "micro_batch_tokens": 24}
    policy = tiny_policy(kind=kind)
    one = learner(policy, **keys)
    for seed in range(2):
        saved = one.update(random_groups(32, seed=seed))
    state = {name: mx.array(np.array(value)) for name, value in one.state().items()}
    resumed_policy = tiny_policy(kind=kind)
    resumed = learner(resumed_policy, **keys)
    resumed_policy.publish(saved.parameters, version=2, step=2, fingerprint=saved.fingerprint)
    resumed.restore(state)
    updates = [x.update(random_groups(32, seed=5)) for x in (one, resumed)]
    assert same_bits(updates[0].parameters, updates[1].parameters)
    assert updates[0].metrics == updates[1].metrics
    assert (updates[0].version, updates[0].fingerprint) == (updates[1].version, updates[1].fingerprint)
    assert same_bits(one.state(), resumed.state())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    """A checkpoint of another rank names the array that differs."""
    one = learner(tiny_policy())
    before = one.state()
    with pytest.raises(ValueError, match="lora_a"):
        one.restore(learner(tiny_policy(rank=8)).state())
    assert same_bits(one.state(), before)


@pytest.mark.needs_float32
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_compiled_and_uncompiled_functions_of_a_model_give_the_same_update(kind: str) -> None:
    """The models of mlx-lm contain functions that `mx.compile` compiles. A compiled function that keeps a weight
    computes with the old value after a swap, so the second update starts from published weights.
    """
    parameters = []
    for switch in (mx.disable_compile, mx.enable_compile):
        switch()
        policy = tiny_policy(kind=kind)
        one = learner(policy, learning_rate=0.3, optimizer="sgd")
        for version in (1, 2):
            update = one.update(on_policy(policy, random_groups(32, seed=version)), step=version - 1)
            assert update.applied
            policy.publish(update.parameters, version=version, step=version, fingerprint=update.fingerprint)
        parameters.append(update.parameters)
    assert largest_difference(parameters[0], tiny_policy(kind=kind).trainable()) > 1e-2
    assert largest_difference(*parameters) < 1e-6


@pytest.mark.lanes
def test_metrics_of_a_fresh_sampler() -> None:
    """A sampler that is the learner: ratio 1, no mismatch, nothing clipped, and the mean advantage is zero."""
    policy = tiny_policy()
    groups = on_policy(policy, random_groups(32))
    metrics = learner(policy).update(groups).metrics
    assert metrics.ratio_mean == pytest.approx(1.0, abs=model_lanes.atol(1e-5))
    assert metrics.mismatch_kl == pytest.approx(0.0, abs=model_lanes.atol(1e-6) ** 2 + 1e-6)
    assert metrics.clip_fraction == 0.0
    assert metrics.trained_tokens == sum(len(c.tokens) for g in groups for c in g.group.completions)
    assert 0.0 < metrics.entropy < math.log(32)
    assert metrics.learning_rate == 1e-2
    assert json.decode(json.encode(metrics), type=type(metrics)) == metrics


def test_mismatch_counts_only_tokens_of_the_learners_own_version() -> None:
    """A stale sampler is expected to differ; one with the learner's weights is not."""
    values = {}
    for version in (0, 3):
        groups = [scored_group([[3, 4], [5, 6]], [1.0, 0.0], version=version)]
        values[version] = learner(tiny_policy()).update(groups).metrics.mismatch_kl
    assert values[0] > 0.01
    assert values[3] == 0.0


def on_policy(policy: Policy, groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """The same groups, with the log-probabilities that the policy itself gives their tokens."""
    result = []
    for g in groups:
        completions = []
        for c in g.group.completions:
            tokens = (*g.group.prompt.tokens, *c.tokens)
            logits_S_V = policy.model(mx.array([tokens]))[0, :-1].astype(mx.float32)
            logp_S_V = model_lanes.numpy(logits_S_V - mx.logsumexp(logits_S_V, axis=-1, keepdims=True))
            rows = range(len(tokens) - 1 - len(c.tokens), len(tokens) - 1)
            completions.append(completion(c.tokens, [float(logp_S_V[t, tokens[t + 1]]) for t in rows]))
        result.append(replace(g, group=replace(g.group, completions=tuple(completions))))
    return result


def test_the_step_places_an_update_in_the_schedule() -> None:
    """The caller counts batches without an update too; by default the learner counts its own updates."""
    one = learner(BigramPolicy(), steps=5, schedule="linear", min_learning_rate=1e-3)
    assert one.update(random_groups(5), step=4).metrics.learning_rate == pytest.approx(1e-2 - 9e-3 * 4 / 5)
    assert one.update(random_groups(5)).metrics.learning_rate == pytest.approx(1e-2 - 9e-3 / 5)


@pytest.mark.lanes("4bit")
def test_the_policy_learns_to_say_what_is_rewarded() -> None:
    """Reward 1 for one token of 32, said one time in twenty at first: most of the mass after 30 updates."""
    policy = tiny_policy()
    one = learner(policy, learning_rate=1e-2, steps=30)
    rng = np.random.default_rng(0)

    def probabilities() -> np.ndarray:
        p_V = model_lanes.numpy(mx.softmax(policy.model(mx.array([[1, 2]]))[0, -1])).astype(np.float64)
        return np.asarray(p_V / p_V.sum())

    target = int(np.abs(probabilities() - 0.05).argmin())
    before = probabilities()[target]
    for step in range(30):
        p_V = probabilities()
        sampled = [int(token) for token in rng.choice(32, size=32, p=p_V)]
        group = scored_group([[token] for token in sampled], [float(token == target) for token in sampled])
        completions = tuple(completion([token], [math.log(p_V[token])], policy.version) for token in sampled)
        update = one.update([replace(group, group=replace(group.group, completions=completions))])
        policy.publish(update.parameters, version=update.version, step=step, fingerprint=update.fingerprint)
    assert before < 0.1
    assert probabilities()[target] > 0.8


def test_the_parameters_before_an_update_are_freed() -> None:
    """The learner's model refers to no parameters between updates, so the process holds the newest and the served."""
    one = learner(tiny_policy())
    replaced = [weakref.ref(array) for array in flat(one.update(random_groups(32)).parameters).values()]
    one.update(random_groups(32, seed=1))
    gc.collect()
    assert replaced
    assert not any(array() is not None for array in replaced)


def test_a_rehearsal_ends_at_the_first_update_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """No further batch is asked for."""
    one = learner(tiny_policy())
    batches = ((step, random_groups(32, seed=step)) for step in range(3))
    with monkeypatch.context() as patch:
        patch.setattr(LearnerModel, "gradient", poisoned(math.nan, number=2))
        found = one.rehearse(batches)
    assert [metrics is not None for metrics in found] == [True, False]
    assert [step for step, _ in batches] == [2]


def test_the_arrays_of_a_checkpoint_are_evaluated() -> None:
    """Another thread writes them, and an array that it had to compute would need the stream of the compute thread."""
    one = learner(tiny_policy())
    assert count(list(one.state().values())) == GraphCounts(nodes=0, kernels=0)
    one.update(random_groups(32))
    assert count(list(one.state().values())) == GraphCounts(nodes=0, kernels=0)
