"""From a group that was checked to the message that the learner takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from numpy.typing import NDArray

from clotho.atropos.behaviour_logprobs import Behaviour, runs, versions
from clotho.atropos.validation import CheckedGroup
from clotho.atropos.wire import WireGroup
from clotho.config.schema import LearnerSection
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, FinishReason, Sampling
from protocols.score import GroupOutcome, ScoredGroup, TeacherTokens

SIGNAL = 1e-6
"""Rewards of a group that differ by no more teach nothing, unless they are compared beyond it."""

BEYOND_THE_GROUP = ("batch", "environment")
"""Values of `learner.advantage` by which equal rewards may teach something."""


class Reading(Struct, frozen=True, kw_only=True):
    """A group that nothing is wrong with, and how each sequence of it was drawn."""

    group: WireGroup
    checked: CheckedGroup
    sequences: list[Behaviour]
    teacher: tuple[TeacherTokens, ...]


def outcome(
    reading: Reading,
    *,
    group_id: int,
    source: str,
    decode: Callable[[Sequence[int]], str],
    sampling: Sampling,
    learner: LearnerSection,
    context_length: int,
) -> GroupOutcome:
    """Make the message; a group whose rewards are all equal is discarded, with all that is known of it.

    The prompt is what all sequences begin with before anything was drawn; the rest of each is its completion.
    """
    checked, sequences = reading.checked, reading.sequences
    opening = reading.group.tokens[0][: checked.common]
    prompt = Prompt(
        group_id=group_id,
        problem=Problem(prompt=decode(opening), answer="", type=source),
        tokens=tuple(opening),
        seed=0,
        source=source,
    )
    completions = tuple(
        _completion(reading, i, decode, most=sampling.max_tokens, context_length=context_length)
        for i in range(len(sequences))
    )
    rewards = checked.rewards
    teaches = checked.advantages or reading.teacher or learner.advantage in BEYOND_THE_GROUP
    if not teaches and max(rewards) - min(rewards) <= SIGNAL:
        detail = f"all {len(rewards)} rewards are {rewards[0]:g}"
        return Discarded(prompt=prompt, reason="no_signal", detail=detail, completions=completions, rewards=rewards)
    temperatures = tuple(sequence.temperature for sequence in sequences)
    differences = [sequence.difference for sequence in sequences if sequence.difference is not None]
    wants_reference = learner.reference == "environment" and learner.kl_beta > 0
    return ScoredGroup(
        group=RolloutGroup(prompt=prompt, completions=completions),
        rewards=rewards,
        parts={},
        token_advantages=_rest(checked.advantages, checked.common),
        reference_logprobs=_rest(checked.reference, checked.common) if wants_reference else (),
        temperatures=temperatures if set(temperatures) != {sampling.temperature} else (),
        muted=checked.muted if any(checked.muted) else (),
        teacher=reading.teacher,
        logprob_error=max(differences, default=None),
    )


def nothing_but_a_number(group_id: int, source: str) -> Prompt:
    """The prompt of a group of which nothing else is kept."""
    return Prompt(
        group_id=group_id, problem=Problem(prompt="", answer="", type=source), tokens=(), seed=0, source=source
    )


def _completion(
    reading: Reading, index: int, decode: Callable[[Sequence[int]], str], *, most: int, context_length: int
) -> Completion:
    common, sequence = reading.checked.common, reading.sequences[index]
    trained_T = reading.checked.trained[index]
    tokens = reading.group.tokens[index][common:]
    supports = tuple(sequence.supports.get(t, b"") for t in range(common, trained_T.size))
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(sequence.logprob_T[common:].tolist()),
        versions=tuple(versions(sequence, trained_T)[common:].tolist()),
        text=decode(tokens),
        finish_reason=sequence.finish_reason or _finish_reason(trained_T, most, context_length),
        supports=supports if any(supports) else (),
        drawn=() if trained_T[common:].all() else tuple(trained_T[common:].tolist()),
    )


def _finish_reason(trained_T: NDArray[Any], most: int, context_length: int) -> FinishReason:
    """What the engine does not remember had room left, or had not."""
    spans = runs(trained_T)
    full = spans and spans[-1][1] - spans[-1][0] >= most
    return "length" if full or trained_T.size >= context_length else "stop"


def _rest(rows: Sequence[NDArray[Any]], common: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row_T[common:].tolist()) for row_T in rows)
