"""The rule that says which sampling distributions the learner can evaluate."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from clotho.inference.sampling import validate
from clotho.settings.engine import SamplingSection
from protocols.errors import ProfileError, RequestError
from protocols.learnability import MIN_LEARNABLE_TEMPERATURE, require_learnable, unlearnable, unlearnable_reason
from protocols.sampling import MAX_SUPPORT, SampleRequest, Sampling, in_use
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
