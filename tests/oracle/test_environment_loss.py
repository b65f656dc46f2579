"""Groups from environments, from tokens to the gradient of every weight, against loops in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clotho.models.parameters import flat
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.learner import LearnerSection
from protocols.rollout import ScoredGroup
from tests.learner_settings import OF_SAMPLES, learner_settings
from tests.oracle.environment_loss import Run, environment_loss
from tests.training.environment_groups import environment_groups
from tests.training.policies_and_groups import BigramPolicy, whole_gradient

BIAS = ((3, 0.4), (0, -0.2))
BESIDE: dict[str, Any] = {"kl_beta": 0.1, "entropy_weight": 0.05, "distillation_weight": 0.3}
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, its recipe": {"objective": name} for name in OF_SAMPLES},
    **{f"advantage {kind}": {"advantage": kind} for kind in ("mean", "leave_one_out", "batch", "batch_centred")},
    **{
        f"aggregation {kind}": {"loss_aggregation": kind}
        for kind in ("token_mean", "sequence_mean", "token_sum", "group_mean")
    },
    **{
        f"correction {kind}": {
            "ratio_reference": "batch_start",
            "correction": kind,
            "correction_low": 0.5,
            "correction_high": 1.5,
        }
        for kind in ("truncate", "mask", "truncate_sequence", "reject_sequence", "reject_geometric")
    },
    "outliers": {"outlier_low": 0.3, "outlier_high": 3.0},
    "off-policy mask": {"off_policy_mask": 0.02},
    "penalty in the reward": {"kl_in": "reward"},
    "distillation alone": {"kl_beta": 0.0, "entropy_weight": 0.0, "distillation_weight": 1.0},
}


def settings_of(case: str, **keys: Any) -> LearnerSection:
    """The recipe of the case's objective, with penalties, and the reference that the groups bring."""
    chosen = {"objective": "grpo", **BESIDE, "reference": "environment", **CASES[case], **keys}
    return learner_settings(**chosen)


def assert_like_the_loops(groups: list[ScoredGroup], settings: LearnerSection) -> None:
    """Loss and gradient by every weight of a bigram model, to 1e-5."""
    policy = BigramPolicy()
    value, arrays = whole_gradient(policy, groups, settings, distribution=SamplingDistribution(0.8, BIAS), max_tokens=9)
    weights = {name: np.array(array, dtype=np.float64) for name, array in flat(policy.trainable()).items()}
    run = Run(settings=settings, temperature=0.8, bias=BIAS, max_tokens=9)
    loss = environment_loss(weights, groups, run)
    assert value == pytest.approx(loss(weights), abs=1e-5)
    for name, array in weights.items():
        slopes = np.zeros_like(array)
        for index in np.ndindex(*array.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = array.copy()
                moved[index] += step
                sides.append(loss({**weights, name: moved}))
            slopes[index] = (sides[0] - sides[1]) / 2e-6
        assert np.abs(slopes).max() > 1e-3
        np.testing.assert_allclose(arrays[name], slopes, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_several_turns_learn_what_the_loops_say(case: str) -> None:
    """Masks, zero-advantage completions, temperatures, supports, teachers and references at once, per objective."""
    assert_like_the_loops(environment_groups(5, groups=3, seed=1), settings_of(case))


@pytest.mark.parametrize("budget", [1, 24])
@pytest.mark.parametrize("layout", ["padded", "auto"])
def test_any_split_learns_the_same(budget: int, layout: str) -> None:
    """One completion at a time, or a few."""
    assert_like_the_loops(
        environment_groups(5, groups=3, seed=1),
        settings_of("grpo, its recipe", micro_batch_tokens=budget, layout=layout),
    )
