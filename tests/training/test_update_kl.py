"""How far an update moved the policy: k3 on a few completions, in passes as small as those of a gradient."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.training.update_kl import COMPLETIONS
from protocols.rollout import ScoredGroup
from tests.training.policies_and_groups import finish, learner, random_groups, tiny_policy


def scores(policy: Policy, parameters: Parameters, group: ScoredGroup, i: int) -> np.ndarray:
    """Log-probability of each token of a completion, the plain way."""
    prompt, tokens = group.group.prompt.tokens, group.group.completions[i].tokens
    with policy.using(parameters):
        logits = policy.model(mx.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
        logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return np.array(mx.take_along_axis(logp, mx.array(tokens)[:, None], axis=-1)[:, 0], dtype=np.float64)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("budget", [1, 24, 8192])
def test_it_is_k3_over_completions_of_the_batch(budget: int, layout: str) -> None:
    """Of eight completions each is looked at; neither the budget of a pass nor the layout changes anything."""
    policy = tiny_policy()
    groups = random_groups(32, groups=COMPLETIONS // 4)
    one = learner(policy, measure_update_kl=True, micro_batch_tokens=budget, layout=layout, learning_rate=0.1)
    update = finish(one.update(groups))
    ratio_N = np.concatenate(
        [
            scores(policy, update.parameters, group, i) - scores(policy, policy.trainable(), group, i)
            for group in groups
            for i in range(4)
        ]
    )
    assert update.metrics.update_kl == pytest.approx(np.mean(np.exp(ratio_N) - 1.0 - ratio_N), rel=1e-3)
    assert update.metrics.update_kl is not None
    assert update.metrics.update_kl > 1e-4


def test_a_few_completions_speak_for_a_large_batch() -> None:
    """Of forty, which are more than it looks at, every second: within a factor of two of all here, and not the same."""
    policy = tiny_policy()
    groups = random_groups(32, groups=10)
    update = finish(learner(policy, measure_update_kl=True, learning_rate=0.1).update(groups))
    ratio_N = np.concatenate(
        [
            scores(policy, update.parameters, group, i) - scores(policy, policy.trainable(), group, i)
            for group in groups
            for i in range(4)
        ]
    )
    whole = np.mean(np.exp(ratio_N) - 1.0 - ratio_N)
    assert update.metrics.update_kl is not None
    assert 0.5 < update.metrics.update_kl / whole < 2.0
    assert update.metrics.update_kl != pytest.approx(whole, rel=1e-6)


def test_a_pass_is_no_larger_than_one_of_a_gradient() -> None:
    """The memory of an update is bounded by `micro_batch_tokens`, this measurement included."""
    turns = [
        len(list(learner(tiny_policy(), measure_update_kl=on, micro_batch_tokens=1).update(random_groups(32))))
        for on in (False, True)
    ]
    assert turns == [12, 12 + 12]


def test_nobody_watches_for_nothing() -> None:
    """Without alarms no further pass is made, and no number given."""
    assert finish(learner(tiny_policy()).update(random_groups(32))).metrics.update_kl is None
