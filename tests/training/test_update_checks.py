"""Checks of an update: its KL on a few completions, in passes as small as those of a gradient, and unmoved adapters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.models.parameters import Arrays, Parameters
from clotho.models.policy import Policy
from clotho.training.optimizers import apply_step, initial_state
from clotho.training.update_checks import COMPLETIONS, AdapterCheck, limited_k3
from protocols.errors import AdapterError
from protocols.rollout import ScoredGroup
from tests import model_lanes
from tests.learner_settings import learner_settings
from tests.recorded_turns import RecordedTurns
from tests.training.policies_and_groups import learner, model_with, random_groups, tiny_policy


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


MODULES = ("layers.0.q_proj", "layers.0.v_proj", "layers.1.experts")


def adapters(*moved: str, value: float = 1e-30) -> Arrays:
    """A and B of all modules, B zero but for one element where it has moved."""
    arrays = {}
    for module in MODULES:
        arrays[f"{module}.lora_a"] = mx.ones((4, 2))
        b = mx.zeros((2, 3))
        b[1, 2] = value if module in moved else 0.0
        arrays[f"{module}.lora_b"] = b
    return arrays


def observe(check: AdapterCheck, times: int, *, moved: Iterable[str] = (), given: Iterable[str] = MODULES) -> None:
    """So many updates after which these B have moved, with gradients for those."""
    for _ in range(times):
        check.check(adapters(*moved), adapters(*given))


def test_an_adapter_of_which_nothing_moves_is_dead_after_three_updates() -> None:
    """Not after two."""
    check = AdapterCheck()
    observe(check, 2)
    with pytest.raises(AdapterError, match=r"after 3 updates .* every adapter is still exactly zero") as caught:
        observe(check, 1)
    assert caught.value.exit_status == 1


def test_an_adapter_without_any_gradient_is_dead_too() -> None:
    """Rewards were unequal and something else learned, such as embeddings: the adapter is cut off."""
    check = AdapterCheck()
    observe(check, 2, given=())
    with pytest.raises(AdapterError, match="every adapter"):
        observe(check, 1, given=())


def test_one_module_that_is_given_gradients_and_stays_is_named() -> None:
    """The others move."""
    check = AdapterCheck()
    observe(check, 2, moved=MODULES[:2])
    with pytest.raises(AdapterError, match=r"^1 adapter\(s\) had gradients in 3 updates .*: layers.1.experts\."):
        observe(check, 1, moved=MODULES[:2])


def test_a_module_that_is_given_no_gradient_may_stay() -> None:
    """Experts that no token was sent to; updates that bring a gradient are counted, whenever they come."""
    check = AdapterCheck()
    observe(check, 10, moved=MODULES[:2], given=MODULES[:2])
    observe(check, 2, moved=MODULES[:2])
    with pytest.raises(AdapterError, match="experts"):
        observe(check, 1, moved=MODULES[:2])


def test_what_has_moved_once_is_not_looked_at_again() -> None:
    """The smallest movement counts; afterwards the arrays need not even be there."""
    check = AdapterCheck()
    observe(check, 1, moved=MODULES)
    check.check({}, {})
    observe(check, 5)


def test_without_an_adapter_there_is_nothing_to_watch() -> None:
    """Full weights may be zero."""
    check = AdapterCheck()
    for _ in range(5):
        check.check({"layers.0.norm.bias": mx.zeros(3)}, {"layers.0.norm.bias": mx.ones(3)})


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_a_living_adapter_passes_with_every_optimizer(kind: str) -> None:
    """One step at the smallest rates is enough."""
    start, gradients = adapters(), {name: 1e-6 * mx.ones(a.shape) for name, a in adapters().items()}
    settings = learner_settings(optimizer=kind)
    state = initial_state(start, settings)
    after, _ = apply_step(start, gradients, state, learning_rate=1e-9, scale=1.0, settings=settings)
    check = AdapterCheck(patience=1)
    check.check(after, gradients)
