"""Rules between settings of what is sampled and learnt."""

from __future__ import annotations

from collections.abc import Iterator

from clotho.config.dependency import Complaint
from clotho.config.nearest import nearest
from clotho.config.presets import OBJECTIVES
from clotho.config.schema import Profile
from protocols.sampling import MAX_SUPPORT


def known_objective(profile: Profile) -> Iterator[Complaint]:
    """The objective is one that there is, or `module:function`."""
    name = profile.learner.objective
    if ":" not in name and name not in OBJECTIVES:
        guess = nearest(name, OBJECTIVES)
        yield (
            "learner.objective",
            f"learner.objective must be one of {', '.join(OBJECTIVES)}, or module:function, not {name!r}"
            + (f"; did you mean {guess}?" if guess else ""),
        )


def learnable_distribution(profile: Profile) -> Iterator[Complaint]:
    """The learner evaluates the distribution that was sampled from: its temperature, its bias, its recorded support."""
    sampling = profile.sampling
    why = "rollouts are learnt from under the distribution they were drawn from"
    if sampling.temperature == 0:
        yield "sampling.temperature", f"sampling.temperature must be > 0, not 0: {why}, and greedy groups teach nothing"
    if sampling.repetition_penalty != 1.0:
        yield (
            "sampling.repetition_penalty",
            f"sampling.repetition_penalty must be 1 in training, not {sampling.repetition_penalty:g}: {why}, and the "
            "learner does not evaluate it",
        )
    if sampling.top_k > MAX_SUPPORT:
        yield (
            "sampling.top_k",
            f"sampling.top_k must be at most {MAX_SUPPORT} in training, or 0 for all tokens, not {sampling.top_k}: "
            f"{why}, which are recorded token by token",
        )
    for name, neutral in (("top_p", 1.0), ("min_p", 0.0)):
        if (value := getattr(sampling, name)) != neutral and sampling.top_k == 0:
            yield (
                f"sampling.{name}",
                f"sampling.{name} = {value:g} needs sampling.top_k of 1 to {MAX_SUPPORT} in training: {why}, and the "
                "tokens that may be drawn are recorded",
            )
    if sampling.top_logprobs:
        yield "sampling.top_logprobs", "sampling.top_logprobs must be 0 in training: only API requests report them"


def bounds_around_one(profile: Profile) -> Iterator[Complaint]:
    """Where sampler and learner agree the ratio is 1: no bound of a ratio may cut that off."""
    settings = profile.learner
    if not settings.correction_low <= 1 <= settings.correction_high:
        path = "learner.correction_low" if settings.correction_low > 1 else "learner.correction_high"
        yield (
            path,
            f"learner.correction_low = {settings.correction_low:g} and learner.correction_high = "
            f"{settings.correction_high:g} must have 1 between them, the ratio where sampler and learner agree",
        )
    for name in ("outlier_high", "dual_clip"):
        if 0 < (value := getattr(settings, name)) <= 1:
            yield f"learner.{name}", f"learner.{name} must be 0 (off) or more than 1, not {value:g}"


def enough_for_mini_batches(profile: Profile) -> Iterator[Complaint]:
    """Every mini-batch has a group to learn from."""
    settings, replay = profile.learner, profile.replay
    groups = settings.batch_size + (replay.groups if replay.capacity else 0)
    if settings.mini_batches > groups:
        yield (
            "learner.mini_batches",
            f"learner.mini_batches = {settings.mini_batches} must be at most the groups of an update, {groups}",
        )
