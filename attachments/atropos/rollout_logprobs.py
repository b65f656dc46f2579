"""Log-probabilities of the rollout policy for a group: from the sample log, else from the environment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from attachments.atropos.sample_log import SampledCompletion, SampleLog
from attachments.atropos.validation import CheckedGroup, InvalidGroup, first_index
from protocols.sampling import MIN_LOGPROB, FinishReason

MAX_LOGPROB_DIFFERENCE = 0.01
"""Largest allowed difference, in nats, between the log-probabilities of an environment and of the sample log."""

Span = tuple[int, int]


class SampledSequence(Struct, kw_only=True):
    """How one sequence was sampled. Arrays have one entry per token, 0 for tokens that the policy did not sample.

    unrecorded: spans that the sample log does not contain. missing: unrecorded spans without log-probabilities from the
    environment. supports: token index -> support. temperature: of all spans. max_difference: largest difference between
    the log-probabilities of the sample log and of the environment.
    """

    logprob_T: NDArray[np.float32]
    version_T: NDArray[np.int32]
    unrecorded: list[Span]
    missing: list[Span]
    supports: dict[int, bytes]
    temperature: float
    finish_reason: FinishReason | None = None
    client_label: str = ""
    max_difference: float | None = None


def sampled_sequence(
    index: int,
    tokens: Sequence[int],
    checked: CheckedGroup,
    sample_log: SampleLog,
    *,
    version: int,
    temperature: float,
) -> SampledSequence:
    """Look up every trained span of a sequence in the sample log.

    version: policy version of spans that are not recorded. temperature: used if neither the sample log nor the
    environment has one. Raises InvalidGroup if the log-probabilities of sample log and environment differ, or if the
    learner cannot evaluate the sampling distribution.
    """
    spans = trained_spans(checked.trained[index])
    given_T = checked.rollout[index] if checked.rollout else None
    found = [
        sample_log.find(tokens, start, end, logprobs=None if given_T is None else given_T[start:end])
        for start, end in spans
    ]
    unrecorded = [span for span, sampled in zip(spans, found, strict=True) if sampled is None]
    sequence = SampledSequence(
        logprob_T=np.zeros(len(tokens), dtype=np.float32) if given_T is None else given_T.astype(np.float32),
        version_T=np.full(len(tokens), version, dtype=np.int32),
        unrecorded=unrecorded,
        missing=unrecorded if given_T is None else [],
        supports={},
        temperature=_temperature(index, found, checked.temperatures[index], default=temperature),
        finish_reason=found[-1].finish_reason if found and found[-1] else None,
        client_label=next((sampled.client_label for sampled in found if sampled and sampled.client_label), ""),
    )
    for (start, end), sampled in zip(spans, found, strict=True):
        if sampled is None:
            continue
        if sampled.unlearnable:
            raise InvalidGroup(f"tokens[{index}][{start}:{end}]: {sampled.unlearnable}")
        if given_T is not None:
            _compare(index, start, given_T[start:end], sampled, sequence)
        sequence.logprob_T[start:end] = sampled.logprobs
        sequence.version_T[start:end] = sampled.versions
        sequence.supports.update(enumerate(sampled.supports, start=start))
    if sequence.supports and len(sequence.supports) != sum(end - start for start, end in spans):
        raise InvalidGroup(
            f"tokens[{index}]: the support of the sampling distribution is recorded for only a part of the spans"
        )
    return sequence


def trained_spans(trained_T: NDArray[np.bool_]) -> list[Span]:
    """Return the maximal spans of trained tokens as (start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], trained_T.astype(np.int8), [0]))))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def token_versions(sequence: SampledSequence, trained_T: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the policy version of every token.

    A token that the policy did not sample takes the version of the sampled token before it, or of the first sampled
    token.
    """
    sampled = np.flatnonzero(trained_T)
    if not sampled.size:
        return sequence.version_T
    source_T = np.maximum.accumulate(np.where(trained_T, np.arange(trained_T.size), sampled[0]))
    return sequence.version_T[source_T]


def _temperature(index: int, found: list[SampledCompletion | None], stated: float | None, *, default: float) -> float:
    """Return the temperature of all spans: recorded spans from the sample log, other spans from the environment."""
    known = {sampled.temperature for sampled in found if sampled is not None}
    if None in found and stated is not None:
        known.add(stated)
    if len(known) > 1:
        listed = ", ".join(f"{value:g}" for value in sorted(known))
        raise InvalidGroup(f"tokens[{index}]: sampled at different temperatures ({listed})")
    return known.pop() if known else default if stated is None else stated


def _compare(
    index: int, start: int, given_T: NDArray[np.float64], sampled: SampledCompletion, sequence: SampledSequence
) -> None:
    difference_T = np.abs(given_T - np.clip(sampled.logprobs.astype(np.float64), MIN_LOGPROB, 0.0))
    if (t := first_index(~(difference_T <= MAX_LOGPROB_DIFFERENCE))) is not None:
        raise InvalidGroup(
            f"inference_logprobs[{index}][{start + t}]: {given_T[t]:.4g} differs from the recorded "
            f"{float(sampled.logprobs[t]):.4g}"
        )
    sequence.max_difference = max(sequence.max_difference or 0.0, float(difference_T.max()))
