"""Every key of the learner's section, and the sampling it can learn from."""

from __future__ import annotations

from typing import Any

import pytest

from actors.compute.update import PolicyLearner, Update
from protocols.errors import ProfileError
from protocols.profile import LearnerSection, SamplingSection
from tests.compute.learning import BigramPolicy, finish, learner, random_groups, same_bits

EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "learning_rate": (2e-2, {}),
    "schedule": ("linear", {}),
    "warmup_steps": (2, {}),
    "min_learning_rate": (5e-3, {"schedule": "cosine"}),
    "beta1": (0.5, {}),
    "beta2": (0.5, {}),
    "epsilon": (1e-2, {}),
    "weight_decay": (0.5, {}),
    "max_grad_norm": (1e-3, {"epsilon": 1e-2}),
    "clip_low": (0.01, {}),
    "clip_high": (0.01, {}),
    "correction": ("truncate", {}),
    "correction_cap": (1.01, {"correction": "truncate"}),
    "kl_beta": (0.5, {}),
    "kl_estimator": ("k2", {"kl_beta": 0.5}),
    "entropy_weight": (0.5, {}),
    "advantage_epsilon": (1.0, {"epsilon": 1e-2}),
}
ELSEWHERE = {"batch_size", "max_staleness", "max_bad_steps", "micro_batch_tokens"}


def two_updates(**keys: Any) -> Update:
    """The second of two updates of a bigram policy whose ratios leave the clip range on both sides."""
    one = learner(BigramPolicy(), steps=3, **keys)
    finish(one.update(random_groups(5)))
    return finish(one.update(random_groups(5, seed=1)))


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_of_the_learner_changes_the_update(key: str) -> None:
    """No option without effect."""
    value, beside = EFFECTS[key]
    assert not same_bits(two_updates(**beside).parameters, two_updates(**beside, **{key: value}).parameters)


def test_no_key_of_the_learner_was_forgotten() -> None:
    """What is not tested above takes effect in the actor, or, as micro_batch_tokens, in how often an update yields."""
    assert set(LearnerSection.__struct_fields__) == EFFECTS.keys() | ELSEWHERE
    assert len(list(learner(BigramPolicy(), micro_batch_tokens=24).update(random_groups(5)))) > 1
    assert len(list(learner(BigramPolicy()).update(random_groups(5)))) == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 2.0),)},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_sampling_that_the_learner_cannot_evaluate_is_refused(keys: dict[str, Any]) -> None:
    """Honest probabilities: the distribution that was sampled is the one that is differentiated, or none is."""
    with pytest.raises(ProfileError, match=f"sampling.{next(iter(keys))}"):
        PolicyLearner(BigramPolicy(), LearnerSection(), SamplingSection(**keys), steps=1)
