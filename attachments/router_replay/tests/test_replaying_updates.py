"""`learner.router_replay`: when an update takes the routes of the sampler, and what it reports."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from protocols.errors import ModelError
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import make_engine, make_prompt, run, submit_request
from tests.small_models import tiny_source
from tests.training.policies_and_groups import BigramPolicy, learner, scored_group

PROMPT = make_prompt(6)


def policy_and_groups(scale: float = 1.0) -> tuple[BigramPolicy, list[ScoredGroup]]:
    """Return a policy with experts, and a group that an engine has sampled from it with other routers.

    The routers of the sampler are those of the policy with their outputs in reverse order. scale: of both.
    """
    model_lanes.skip_quantized()
    source = tiny_source("qwen3_moe")
    plain = [block.mlp.gate.weight for block in source.model.layers]
    for block in source.model.layers:
        block.mlp.gate.weight = mx.contiguous(scale * block.mlp.gate.weight[::-1])
    engine = make_engine(source)
    answer = submit_request(engine, PROMPT, Sampling(max_tokens=8, ignore_eos=True), (1, 2, 3), record_routes=True)
    run(engine)
    for block, weight in zip(source.model.layers, plain, strict=True):
        block.mlp.gate.weight = scale * weight
    group = scored_group([one.tokens for one in answer.completions], (0.0, 1.0, 3.0), prompt=PROMPT)
    return BigramPolicy(source.model, source.vocab_size), [with_completions(group, answer.completions)]


def with_completions(group: ScoredGroup, completions: list[Completion]) -> ScoredGroup:
    """Return the group with the completions of the engine."""
    rollouts = RolloutGroup(prompt=group.prompt, completions=tuple(completions))
    return replace(group, group=rollouts)


@pytest.mark.parametrize(
    ("mode", "seen", "replayed"),
    [("off", True, None), ("auto", False, False), ("auto", True, True), ("on", False, True)],
)
def test_an_update_replays_routes_if_that_is_asked_for(mode: str, seen: bool, replayed: bool | None) -> None:
    """With `auto`, from the parity check on that finds flipped routes. With `off`, they are not even counted."""
    policy, groups = policy_and_groups()
    policy.flips_routes = seen
    metrics = learner(policy, router_replay=mode, kl_in="loss").update(groups).metrics
    assert metrics.replayed_routes is bool(replayed)
    if replayed is None:
        assert metrics.flipped_routes is None
        return
    assert metrics.flipped_routes is not None
    assert metrics.flipped_routes > 100
    assert metrics.update_applied


def test_a_replayed_update_computes_the_probabilities_of_the_sampler() -> None:
    """With routers that weight experts alike, the routes are all that differs: the divergence is 0 with replay only."""
    found: dict[str, Any] = {}
    for mode in ("on", "auto"):
        policy, groups = policy_and_groups(1e-6)
        found[mode] = learner(policy, router_replay=mode).update(groups).metrics
    assert abs(found["on"].mismatch_kl) < 1e-9
    assert found["auto"].mismatch_kl > 1e-3
    assert found["auto"].flipped_routes > 100


def test_replay_that_has_begun_goes_on_after_a_checkpoint() -> None:
    """The state of the learner says so, whatever the first parity check of the next process finds."""
    policy, groups = policy_and_groups()
    policy.flips_routes = True
    one = learner(policy, router_replay="auto")
    one.update(groups)
    state = one.state()
    mx.eval(state)
    again, _ = policy_and_groups()
    two = learner(again, router_replay="auto")
    two.restore(state)
    assert two.update(groups).metrics.replayed_routes


def test_replay_needs_experts() -> None:
    """A dense model is refused; "auto" has no effect there."""
    with pytest.raises(ModelError):
        learner(BigramPolicy(), router_replay="on")
    assert learner(BigramPolicy(), router_replay="auto").update([scored_group([[1, 2], [3]], [0.0, 1.0])]).applied
