"""How far an update moves the policy: on a few completions, in passes as small as those of a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from protocols.rollout import ScoredGroup
from tests import model_lanes
from tests.recorded_turns import RecordedTurns
from tests.training.policies_and_groups import learner, model_with, random_groups, tiny_policy
from training_run.update_values import COMPLETIONS, limited_k3


def log_ratios(policy: Policy, parameters: Parameters, groups: Sequence[ScoredGroup]) -> np.ndarray:
    """Log-ratio of each token of all completions between these parameters and those of the policy, the plain way."""
    after, before = model_with(policy, parameters), model_with(policy, policy.trainable())

    def scores(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        logits = model(mx.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1].astype(mx.float32)
        logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return np.array(mx.take_along_axis(logp, mx.array(list(tokens))[:, None], axis=-1)[:, 0], dtype=np.float64)

    rows = [(group.group.prompt.tokens, one.tokens) for group in groups for one in group.group.completions]
    return np.concatenate([scores(after, *row) - scores(before, *row) for row in rows])


@pytest.mark.parametrize(("budget", "layout"), [(24, "packed"), (8192, "padded")])
def test_it_is_the_mean_over_completions_of_the_batch(budget: int, layout: str) -> None:
    """Of eight completions each is looked at; neither the budget of a pass nor the layout changes anything."""
    policy = tiny_policy()
    groups = random_groups(32, groups=COMPLETIONS // 4)
    one = learner(policy, measure_update_kl=True, micro_batch_tokens=budget, layout=layout, learning_rate=0.1)
    update = one.update(groups)
    expected = limited_k3(log_ratios(policy, update.parameters, groups)).mean()
    assert update.metrics.update_kl == pytest.approx(expected, rel=model_lanes.rtol(1e-3))
    assert update.metrics.update_kl is not None
    assert update.metrics.update_kl > 1e-4


def test_tokens_that_an_update_made_probable_count_linearly() -> None:
    """Below a ratio of e, it is k3; from there it goes on with the same slope."""
    d_N = np.linspace(-20, 1, 100)
    np.testing.assert_allclose(limited_k3(d_N), np.exp(d_N) - 1 - d_N, atol=1e-12)
    d_N = np.linspace(1, 20, 100)
    np.testing.assert_allclose(limited_k3(d_N), np.e - 2 + (np.e - 1) * (d_N - 1))
    assert np.isnan(limited_k3(np.array([np.nan]))).all()


def test_a_few_completions_speak_for_a_large_batch() -> None:
    """Of forty, which are more than it looks at, every second: within a factor of two of all here, and not the same."""
    policy = tiny_policy()
    groups = random_groups(32, groups=10)
    update = learner(policy, measure_update_kl=True, learning_rate=0.1).update(groups)
    whole = limited_k3(log_ratios(policy, update.parameters, groups)).mean()
    assert update.metrics.update_kl is not None
    assert 0.5 < update.metrics.update_kl / whole < 2.0
    assert update.metrics.update_kl != pytest.approx(whole, rel=1e-6)


def test_a_pass_is_no_larger_than_one_of_a_gradient() -> None:
    """The memory of an update is bounded by `micro_batch_tokens`, this measurement included."""
    keys: dict[str, Any] = {"micro_batch_tokens": 1, "max_turn_ms": 0.0}
    pauses = []
    for on in (False, True):
        lane = RecordedTurns()
        learner(tiny_policy(), measure_update_kl=on, lane=lane, **keys).update(random_groups(32))
        pauses.append(lane.pauses)
    assert pauses[1] - pauses[0] == 12


def test_after_the_first_steps_some_updates_in_a_row_are_measured() -> None:
    """As many as a collapse needs, of every eight: enough for two bad ones in a row, at a quarter of the cost."""
    one = learner(tiny_policy(), measure_update_kl=2)
    groups = random_groups(32, groups=1, size=2)
    found = [
        step for step in (0, 8, 9, 10, 15, 16, 17, 18, 24, 25, 26) if one.update(groups, step=step).metrics.update_kl
    ]
    assert found == [0, 8, 9, 16, 17, 24, 25]


def test_nobody_watches_for_nothing() -> None:
    """Without alarms no further pass is made, and no number given."""
    assert learner(tiny_policy()).update(random_groups(32)).metrics.update_kl is None
