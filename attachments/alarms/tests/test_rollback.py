"""The policy that is gone back to: it has proved itself, and survives a resume with all else that learning carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from attachments.alarms.hooks import RollbackPolicy
from clotho.settings.learner import LearnerSection
from clotho.training.learner_state import LearnerSnapshot, LearnerState
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizers import initial_state
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import learner, random_groups, same_bits, tiny_policy

CARRIED: dict[str, Any] = {"num_minibatches": 2, "kl_beta": 0.1, "kl_target": 1e-3, "entropy_target": 9.0}
"""Controllers, dealt mini-batches and policies to go back to."""

REFERENCES: list[dict[str, Any]] = [
    {"reference": "average", "ref_ema": 0.5},
    {"reference": "snapshot", "reference_interval": 2},
    {"reference": "base"},
]


def copied(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the arrays as a file returns them."""
    return {name: mx.array(np.array(array)) for name, array in arrays.items()}


def snapshot(number: int) -> LearnerSnapshot:
    """A learner after so many updates."""
    parameters = {"w": mx.array([float(number)])}
    return LearnerSnapshot(
        parameters, LearnerState(initial_state(parameters, LearnerSection()), LossCoefficients(0.0, 0.0)), {}
    )


def test_what_is_gone_back_to_has_stayed_healthy_for_a_window() -> None:
    """With windows of 2: after update 4 the policy of update 2 is good, after 6 that of update 4."""
    good = RollbackPolicy(snapshot(0), window=2)
    back = []
    for number in range(1, 8):
        good.observe(snapshot(number), healthy=True)
        back.append(good.arrays()["healthy.parameters.w"].item())
    assert back == [0, 0, 0, 2, 2, 4, 4]


def test_what_does_not_look_healthy_proves_nothing_and_a_return_begins_anew() -> None:
    """Bad updates are not counted; after going back the candidate is the good one itself."""
    good = RollbackPolicy(snapshot(0), window=1)
    for number, healthy in enumerate([True, True, False, False], start=1):
        good.observe(snapshot(number), healthy=healthy)
    assert np.array(good.roll_back().parameters["w"]) == [1.0]
    good.observe(snapshot(9), healthy=True)
    assert np.array(good.roll_back().parameters["w"]) == [1.0]


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda keys: keys["reference"])
def test_every_state_of_learning_is_restored_bit_for_bit(reference: dict[str, Any]) -> None:
    """A resumed learner goes back, and learns on, as the one that was never interrupted."""
    policy, resumed_policy = tiny_policy(), tiny_policy()
    one, resumed = (learner(p, **CARRIED, **reference) for p in (policy, resumed_policy))
    good = RollbackPolicy(one.snapshot(), window=1)
    for seed in range(3):
        saved = one.update(random_groups(32, seed=seed))
        good.observe(one.snapshot(), healthy=seed < 2)
    one.roll_back(good.roll_back(), rate=0.5)
    one.update(random_groups(32, seed=3), step=3)
    good.observe(one.snapshot(), healthy=True)
    resumed_policy.publish(one.parameters, version=one.version, step=4, fingerprint=one.fingerprint)
    resumed.restore(copied(one.state()))
    good_again = RollbackPolicy(resumed.snapshot(), window=1)
    settings = learner_settings(**CARRIED, **reference)
    good_again.restore(copied(good.arrays()), healthy_updates=good.healthy_updates, settings=settings)
    assert one.version == saved.version + 2
    for _ in range(2):
        updates = [x.update(random_groups(32, seed=5), step=4) for x in (one, resumed)]
        assert updates[0].metrics == updates[1].metrics
        assert updates[0].fingerprint == updates[1].fingerprint
        for x, kept in ((one, good), (resumed, good_again)):
            x.roll_back(kept.roll_back(), rate=0.5)
        assert same_bits(one.parameters, resumed.parameters)
        assert same_bits(one.state(), resumed.state())


def test_going_back_takes_everything_back_but_the_rate_and_the_version() -> None:
    """Parameters, moments, controllers and reference are those of the good policy; versions only ever rise."""
    one = learner(tiny_policy(), **CARRIED, **REFERENCES[0])
    start, good = one.parameters, one.snapshot()
    before = one.state()
    for seed in range(2):
        one.update(random_groups(32, seed=seed))
    one.roll_back(good, rate=0.5)
    assert same_bits(one.parameters, start)
    assert one.version == 3
    names = [name for name in before if name != "scalars"]
    assert same_bits({name: one.state()[name] for name in names}, {name: before[name] for name in names})
    again = one.update(random_groups(32), step=0)
    assert again.metrics.learning_rate == pytest.approx(0.5e-2)
    assert (again.metrics.kl_beta, again.metrics.entropy_coef) == (0.1, 0.0)


@pytest.mark.parametrize(
    "other",
    [{"optimizer": "lion"}, {"reference": "base"}, {"reference": "snapshot", "reference_interval": 2, "rank": 8}],
    ids=["optimizer", "reference", "parameters"],
)
def test_policies_that_do_not_fit_the_learner_are_refused(other: dict[str, Any]) -> None:
    """And nothing is changed: those that are kept stay."""
    rank = other.pop("rank", 4)
    mine: dict[str, Any] = {"kl_beta": 0.1, "reference": "snapshot", "reference_interval": 2}
    theirs = {**mine, **other} if "reference" not in other else {"kl_beta": 0.1, **other}
    kept = RollbackPolicy(learner(tiny_policy(), **mine).snapshot(), window=1)
    one = learner(tiny_policy(rank=rank), **theirs)
    good = RollbackPolicy(one.snapshot(), window=1)
    before = good.arrays()
    with pytest.raises(ValueError, match=r"fit|reference"):
        good.restore(kept.arrays(), healthy_updates=3, settings=learner_settings(**theirs))
    assert good.healthy_updates == 0
    assert same_bits(good.arrays(), before)
