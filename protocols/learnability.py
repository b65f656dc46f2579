"""The rule that says which sampling distributions the learner can evaluate.

This is its only definition. The profile, the learner, the sample log and the readers of environments' groups use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocols.errors import ProfileError
from protocols.sampling import (
    MAX_SUPPORT,
    PARAMETERS,
    Completion,
    SampleRequest,
    Sampling,
    can_record_support,
    in_use,
    restricts_support,
)

MIN_LEARNABLE_TEMPERATURE = 1e-3
"""Lowest temperature that the learner trains on. Below it, sampling is greedy for all practical purposes."""


class Unlearnable(NamedTuple):
    """The parameter that the learner cannot evaluate, and the reason."""

    parameter: str
    reason: str


def unlearnable(sampling: Sampling) -> Unlearnable | None:
    """Return why the learner cannot evaluate this sampling distribution; None if it can."""
    if not sampling.temperature >= MIN_LEARNABLE_TEMPERATURE:
        return Unlearnable(
            "temperature",
            f"temperature = {sampling.temperature:g} is greedy decoding: the learner needs a temperature of at least "
            f"{MIN_LEARNABLE_TEMPERATURE:g}",
        )
    for name in in_use(sampling, learner="cannot evaluate"):
        parameter = PARAMETERS[name]
        if not parameter.is_scalar:
            return Unlearnable(name, f"{name} is set: the learner cannot evaluate it; remove it")
        value, neutral = getattr(sampling, name), parameter.neutral
        return Unlearnable(name, f"{name} = {value:g}: the learner cannot evaluate it; set it to {neutral:g}")
    if restricts_support(sampling) and not can_record_support(sampling):
        name = in_use(sampling, learner="replays support")[0] if sampling.top_k == 0 else "top_k"
        return Unlearnable(
            name,
            f"{name} = {getattr(sampling, name):g}: set top_k to 1 to {MAX_SUPPORT}, because the learner needs the set "
            f"of tokens that could be sampled, and the engine records at most {MAX_SUPPORT} tokens per position",
        )
    return None


def unlearnable_completion(
    request: SampleRequest, completion: Completion, *, logit_bias: Sequence[tuple[int, float]] = ()
) -> str:
    """Return why the learner cannot evaluate the distribution of a completion of a client; empty if it can.

    logit_bias: that of the run.
    """
    if request.constraint is not None:
        return "the completion was constrained by a grammar, which the learner cannot evaluate"
    return unlearnable_reason(request.sampling, support_recorded=bool(completion.supports), logit_bias=logit_bias)


def unlearnable_reason(
    sampling: Sampling, *, support_recorded: bool, logit_bias: Sequence[tuple[int, float]] = ()
) -> str:
    """Return why the learner cannot evaluate the distribution that a completion was sampled from; empty if it can.

    support_recorded: the completion carries its supports. logit_bias: that of the run.
    """
    if (found := unlearnable(sampling)) is not None:
        return found.reason
    if sorted(sampling.logit_bias) != sorted(logit_bias):
        return "logit_bias differs from that of the run"
    if restricts_support(sampling) and not support_recorded:
        return f"{', '.join(in_use(sampling, learner='replays support'))}: the supports were not recorded"
    return ""


def require_learnable(sampling: Sampling) -> None:
    """Raise ProfileError if the learner cannot evaluate this sampling distribution."""
    if (found := unlearnable(sampling)) is not None:
        raise ProfileError(f"sampling.{found.reason}")
