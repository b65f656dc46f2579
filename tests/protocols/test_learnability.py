"""The rule that says which sampling distributions the learner can evaluate."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from clotho.inference.sampling import validate
from clotho.settings.engine import SamplingSection
from protocols.errors import ProfileError, RequestError
from protocols.learnability import (
    MIN_LEARNABLE_TEMPERATURE,
    require_learnable,
    unlearnable,
    unlearnable_completion,
    unlearnable_reason,
)
from protocols.sampling import MAX_SUPPORT, Completion, SampleRequest, Sampling, in_use
from training_run.profile.rules import learnable_distribution
from training_run.profile.schema import Profile

BELOW = MIN_LEARNABLE_TEMPERATURE * (1 - 1e-9)

BOUNDARY: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.0}, "temperature"), ({"temperature": BELOW}, "temperature"),
    ({"temperature": MIN_LEARNABLE_TEMPERATURE}, ""), ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"presence_penalty": 0.1}, "presence_penalty"), ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ({"min_tokens": 1}, "min_tokens"), ({"allowed_token_ids": (1,)}, "allowed_token_ids"),
    ({"bad_words": ((1, 2),)}, "bad_words"), ({"top_k": MAX_SUPPORT}, ""), ({"top_k": MAX_SUPPORT + 1}, "top_k"),
    ({"top_p": 0.9}, "top_p"), ({"min_p": 0.1}, "min_p"), ({"top_k": MAX_SUPPORT, "top_p": 0.9, "min_p": 0.1}, ""),
    ({"logit_bias": ((1, 2.0),)}, ""),
]  # fmt: skip


def profile(sampling: dict[str, Any]) -> Profile:
    """Return a profile with these sampling parameters."""
    tables = {
        "model": {"path": "embedded"},
        "data": {"train": "x.jsonl"},
        "rewards": [{"name": "exact", "correct": True}],
        "sampling": sampling,
    }
    return msgspec.convert(tables, Profile)


@pytest.mark.parametrize(("parameters", "refused"), BOUNDARY, ids=str)
def test_all_users_of_the_rule_agree_at_its_boundary(parameters: dict[str, Any], refused: str) -> None:
    """The profile, the learner and the sample log refuse the same sampling distributions."""
    sampling = SamplingSection(**parameters)
    found = unlearnable(sampling)
    assert (found.parameter if found else "") == refused
    keys = [complaint.key for complaint in learnable_distribution(profile(parameters))]
    assert keys == ([f"sampling.{refused}"] if refused else [])
    reason = unlearnable_reason(sampling, support_recorded=True, logit_bias=sampling.logit_bias)
    assert bool(reason) == bool(refused)
    if refused:
        with pytest.raises(ProfileError, match=refused):
            require_learnable(sampling)
    else:
        require_learnable(sampling)


def test_the_engine_records_every_support_that_the_learner_can_evaluate() -> None:
    """A distribution with filters is learnable exactly if the engine accepts a request to record its supports."""
    for parameters, refused in BOUNDARY:
        if in_use(sampling := Sampling(**parameters), learner="replays support"):
            request = SampleRequest(prompt=(1,), sampling=sampling, seeds=(0,), record_support=True)
            try:
                validate(request, vocabulary=1000, context=512, cache_tokens=512)
            except RequestError:
                assert refused
            else:
                assert not refused


@pytest.mark.parametrize(
    ("parameters", "recorded", "biased", "learnable"),
    [
        ({}, False, (), True),
        ({"top_k": 4}, True, (), True),
        ({"top_k": 4}, False, (), False),
        ({"logit_bias": ((1, 2.0), (3, -1.0))}, False, ((3, -1.0), (1, 2.0)), True),
        ({"logit_bias": ((1, 2.0),)}, False, (), False),
        ({}, False, ((1, 2.0),), False),
    ],
)
def test_a_completion_is_learnable_with_its_supports_and_the_bias_of_the_run(
    parameters: dict[str, Any], recorded: bool, biased: tuple[tuple[int, float], ...], learnable: bool
) -> None:
    """The order of the bias is free. A grammar makes every completion unlearnable."""
    sampling = Sampling(**parameters)
    assert (unlearnable_reason(sampling, support_recorded=recorded, logit_bias=biased) == "") == learnable
    supports = (bytes(8),) if recorded else ()
    done = Completion(tokens=(1,), logprobs=(-1.0,), versions=(0,), text="", finish_reason="stop", supports=supports)
    for constraint in (None, cast(Any, object())):
        request = SampleRequest(prompt=(1,), sampling=sampling, seeds=(0,), constraint=constraint)
        reason = unlearnable_completion(request, done, logit_bias=biased)
        assert (reason == "") == (learnable and constraint is None)
