"""Log-probabilities of servers against the learner's: which groups count, and for which server."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs

from attachments.remote.answer_checks import ServerComparison
from protocols.prompt import Prompt
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion, SampleRequest, Sampling, completion_seeds
from protocols.step import StepReport, TokenValues, TrainedGroup
from tests.actors.actor_helpers import policy_updated
from tests.rewards.groups import problem


def trained(seed: int, sampler: Sequence[float], learner: Sequence[float]) -> TrainedGroup:
    """Return a group of one completion with these log-probabilities. Learner: NaN for tokens without training."""
    size = len(sampler)
    completion = Completion(
        tokens=(1,) * size, logprobs=tuple(sampler), versions=(0,) * size, text="a", finish_reason="stop"
    )
    prompt = Prompt(group_id=seed, problem=problem(), tokens=(1, 2), seed=seed)
    scored = ScoredGroup(group=RolloutGroup(prompt=prompt, completions=(completion,)), rewards=(1.0,), parts={})
    learner_T = np.array(learner, dtype="<f4").tobytes()
    values = TokenValues(learner_logprob=learner_T, advantage=b"", cut=b"", gradient_share=b"")
    return TrainedGroup(scored=scored, advantages=(1.0,), tokens=(values,))


def report(*groups: TrainedGroup) -> StepReport:
    """Return the report of a batch."""
    return policy_updated({}, step=1, version=1, trained=groups).report


def request(seed: int) -> SampleRequest:
    """Return the request of a group."""
    return SampleRequest(prompt=(1, 2), sampling=Sampling(), seeds=completion_seeds(seed, 1))


@pytest.fixture
def comparison() -> ServerComparison:
    """Two groups of one server, and one of another."""
    found = ServerComparison()
    for seed, server in ((1, "one"), (2, "one"), (3, "other")):
        found.sampled(request(seed), server)
    return found


def test_the_largest_difference_of_a_group_counts(comparison: ServerComparison) -> None:
    """Means over the tokens that were trained on, by server; a group of no server is ignored."""
    groups = [
        trained(1, (-1.0, -2.0, -3.0), (-1.5, -2.5, math.nan)),
        trained(2, (-1.0,), (-1.0,)),
        trained(3, (-1.0, -1.0), (-1.25, -1.0)),
        trained(4, (-1.0,), (-9.0,)),
    ]
    assert comparison.differences(report(*groups)) == {"one": 0.5, "other": 0.125}


def test_a_log_probability_that_is_not_finite_differs(comparison: ServerComparison) -> None:
    """The learner computes minus infinity for a token that it would never sample."""
    assert comparison.differences(report(trained(1, (-1.0,), (-math.inf,)))) == {"one": math.inf}


def test_groups_of_a_policy_that_was_rolled_back_are_not_compared(comparison: ServerComparison) -> None:
    """A diverged policy differs from every server."""
    rolled_back = structs.replace(report(trained(1, (-1.0,), (-9.0,))), rolled_back=True)
    assert comparison.differences(rolled_back) == {}
