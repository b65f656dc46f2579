"""The reference that groups bring: learned from as it is, and nothing is kept or computed for it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.training.reference_policy import ReferencePolicy
from protocols.rollout import ScoredGroup
from tests.learner_settings import learner_settings
from tests.recorded_turns import RecordedTurns
from tests.training.environment_groups import with_completions
from tests.training.policies_and_groups import BigramPolicy, learner, random_groups, same_bits, tiny_policy

BROUGHT: dict[str, Any] = {"kl_beta": 0.5, "reference": "environment"}


class WithoutReference(BigramPolicy):
    """A policy without a reference policy."""

    def use_reference(self) -> None:
        raise AssertionError("nothing computes as the reference policy")


def brought(groups: list[ScoredGroup], policy: BigramPolicy) -> list[ScoredGroup]:
    """The same groups, with what the frozen policy says of their tokens."""
    reference = policy.copy_model()
    reference.use_reference()
    logits_V_V = np.array(reference.model(mx.arange(5)[None])[0], dtype=np.float64)
    logp_V_V = logits_V_V - np.log(np.exp(logits_V_V).sum(axis=-1, keepdims=True))
    result = []
    for g in groups:
        rows = []
        for c in g.group.completions:
            tokens = (*g.group.prompt.tokens, *c.tokens)[-len(c.tokens) - 1 :]
            rows.append(tuple(float(logp_V_V[a, b]) for a, b in pairwise(tokens)))
        result.append(with_completions(g, g.group.completions, reference_logprobs=tuple(rows)))
    return result


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_what_groups_bring_is_what_a_reference_policy_would_have_said(kl_in: str) -> None:
    """The same update as with that policy, without its passes; two micro-batches, two epochs."""
    groups = brought(random_groups(5), BigramPolicy())
    keys: dict[str, Any] = {
        "kl_beta": 0.5, "kl_in": kl_in, "epsilon": 1e-3, "micro_batch_tokens": 40, "max_turn_ms": 0.0,
        "update_epochs": 2,
    }  # fmt: skip
    base = learner(BigramPolicy(), **keys).update(groups)
    own = learner(WithoutReference(), **keys, reference="environment").update(groups)
    assert base.metrics.kl > 0.01
    assert own.metrics.kl == pytest.approx(base.metrics.kl, rel=1e-4)
    assert own.metrics.loss == pytest.approx(base.metrics.loss, rel=1e-4)
    assert own.metrics.grad_norm == pytest.approx(base.metrics.grad_norm, rel=1e-4)
    pauses = []
    for reference in ("base", "environment"):
        lane = RecordedTurns()
        learner(BigramPolicy(), **keys, lane=lane, reference=reference).update(groups)
        pauses.append(lane.pauses)
    steps = keys["update_epochs"]
    assert pauses[0] - pauses[1] == (pauses[1] - steps) // 2


def test_nothing_is_kept_for_it() -> None:
    """No weights in memory, none in a checkpoint."""
    policy = tiny_policy()
    reference = ReferencePolicy(policy, learner_settings(**BROUGHT))
    assert (reference.needed, reference.arrays) == (False, {})
    assert not [name for name in learner(policy, **BROUGHT).state() if name.startswith("reference.")]


def test_a_group_without_one_is_refused_and_changes_nothing() -> None:
    """Whoever sends groups to the learner has looked at that before."""
    one = learner(tiny_policy(), **BROUGHT)
    before = one.parameters
    with pytest.raises(ValueError, match="group 0 has no reference log-probabilities"):
        one.update(random_groups(32))
    assert same_bits(one.parameters, before)
