"""Updates from stale rollouts: the step scale of VCPO."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from clotho.models.parameters import flat
from clotho.training.optimizer_steps import effective_sample_size, step_scale
from tests.learner_settings import learner_settings
from tests.training.environment_groups import with_completions
from tests.training.policies_and_groups import (
    BigramPolicy,
    learner,
    same_bits,
    scored_group,
    tiny_policy,
)
from tests.training.weighted_groups import sampled_with


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


def test_a_recorded_log_probability_that_is_no_number_rejects_the_update() -> None:
    """Also where the loss itself does not use it."""
    one = learner(tiny_policy(), objective="grpo", ratio_reference="batch_start", step_scale="ess")
    before = one.parameters
    spoilt = one.update([scored_group([[3, 4], [5, 6]], [1.0, 0.0], logprob=math.nan)])
    assert (spoilt.applied, spoilt.finite) == (False, False)
    assert same_bits(one.parameters, before)
