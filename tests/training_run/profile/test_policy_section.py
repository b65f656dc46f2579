"""Every key of the policy's section changes what is trained, or how."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from clotho.models.parameters import flat
from clotho.models.policy import Policy
from clotho.settings.model import LARGE_MODEL, AdapterMethod, PolicySection
from tests.learner_settings import policy_settings
from tests.training.policies_and_groups import learner, model_with, random_groups, tiny_policy

EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kind": ("dora", {}),
    "rank": (2, {}),
    "ranks": (("q_proj=2",), {}),
    "scale": (4.0, {}),
    "alpha": (4.0, {"scale": None}),
    "scaling": ("rank_stabilized", {"scale": None, "alpha": 4.0}),
    "dropout": (0.5, {}),
    "num_layers": (1, {}),
    "target_modules": (("q_proj",), {}),
    "train_embeddings": (True, {}),
    "train_head": (True, {"tied": False}),
}


def logits_after_two_updates(policy: Policy) -> mx.array:
    """What the trained policy says."""
    one = learner(policy)
    for seed in range(2):
        updated = one.update(random_groups(32, seed=seed))
    logits: mx.array = model_with(policy, updated.parameters)(mx.array([[1, 2, 3, 4]]))
    return logits


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_of_the_policy_changes_what_comes_of_training(key: str) -> None:
    """No option without effect."""
    value, beside = EFFECTS[key]
    other = logits_after_two_updates(tiny_policy(**{**beside, key: value}))
    assert not mx.allclose(logits_without(tuple(beside.items())), other, atol=1e-6).item()


@cache
def logits_without(beside: tuple[tuple[str, Any], ...]) -> mx.array:
    """The logits with these keys, which several keys are compared with."""
    return logits_after_two_updates(tiny_policy(**dict(beside)))


def test_no_key_of_the_policy_was_forgotten() -> None:
    """grad_checkpoint decides how gradients are computed, never what they are: its own test is below."""
    assert {"kind", *AdapterMethod.__struct_fields__} == EFFECTS.keys()


@pytest.mark.parametrize(
    ("section", "parameters", "recomputed"),
    [
        (policy_settings("full", grad_checkpoint="auto"), LARGE_MODEL, True),
        (policy_settings(grad_checkpoint="auto"), LARGE_MODEL - 1, False),
        (policy_settings(grad_checkpoint="auto", dropout=0.1), LARGE_MODEL, False),
        (policy_settings(grad_checkpoint=True), 1, True),
        (policy_settings(grad_checkpoint=False), LARGE_MODEL, False),
    ],
)
def test_large_models_recompute_their_blocks_unless_a_profile_says_otherwise(
    section: PolicySection, parameters: int, recomputed: bool
) -> None:
    """Dropout excludes it: a recomputed block would draw another mask."""
    assert section.recomputes(parameters) is recomputed


def test_checkpointed_blocks_are_computed_again_for_the_gradient() -> None:
    """The same update from twice as many block evaluations."""
    calls: dict[bool, int] = {}
    for checkpoint in (False, True):
        policy = tiny_policy(grad_checkpoint=checkpoint)
        block = type(policy.model.layers[0])
        original, count = block.__call__, 0

        def counted(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return original(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block, "__call__", counted)
            one = learner(policy, layout="padded")
            count = 0
            one.update(random_groups(32))
        calls[checkpoint] = count
        names = flat(one.parameters).keys()
    assert names
    assert calls[True] == 2 * calls[False]
