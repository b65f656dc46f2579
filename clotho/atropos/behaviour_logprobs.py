"""How each sequence of a group was sampled: from the engine's memory, else from what the environment passed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from clotho.atropos.validation import LOWEST, CheckedGroup, first
from clotho.atropos.wire import Refused
from clotho.inference.sample_log import SampledCompletion
from protocols.sampling import FinishReason

DIFFERENCE = 0.01
"""Nats by which what an environment passes on may differ from what the engine drew with: rounding, and no more."""

Span = tuple[int, int]


class Memory(Protocol):
    """What the engine remembers; `clotho.inference.sample_log.SampleLog` does."""

    def find(
        self, tokens: Sequence[int], start: int, end: int, *, logprobs: NDArray[np.float64] | None = None
    ) -> SampledCompletion | None:
        """Return how tokens[start:end] were sampled after tokens[:start]; logprobs: which of several draws is meant."""


class Behaviour(Struct, kw_only=True):
    """How one sequence was sampled, as far as it is known; arrays have one entry per token, 0 where none was sampled.

    unremembered: spans that the engine does not remember; unknown: those of them that the environment has no
    log-probabilities of either. supports: by token.
    temperature: of all spans. difference: between the engine's log-probabilities and the environment's, at most.
    """

    logprob_T: NDArray[np.float32]
    version_T: NDArray[np.int32]
    unremembered: list[Span]
    unknown: list[Span]
    supports: dict[int, bytes]
    temperature: float
    finish_reason: FinishReason | None = None
    client_label: str = ""
    difference: float | None = None


def behaviour(
    index: int, tokens: Sequence[int], checked: CheckedGroup, memory: Memory, *, version: int, temperature: float
) -> Behaviour:
    """Look up every span of a sequence; version: of weights that drew what is not remembered.

    temperature: where neither engine nor environment says. Raises Refused where the two disagree, or the learner
    cannot evaluate what it was sampled from.
    """
    spans = runs(checked.trained[index])
    given_T = checked.behaviour[index] if checked.behaviour else None
    found = [
        memory.find(tokens, start, end, logprobs=None if given_T is None else given_T[start:end])
        for start, end in spans
    ]
    unremembered = [span for span, sampled in zip(spans, found, strict=True) if sampled is None]
    sequence = Behaviour(
        logprob_T=np.zeros(len(tokens), dtype=np.float32) if given_T is None else given_T.astype(np.float32),
        version_T=np.full(len(tokens), version, dtype=np.int32),
        unremembered=unremembered,
        unknown=unremembered if given_T is None else [],
        supports={},
        temperature=_temperature(index, found, checked.temperatures[index], default=temperature),
        finish_reason=found[-1].finish_reason if found and found[-1] else None,
        client_label=next((sampled.client_label for sampled in found if sampled and sampled.client_label), ""),
    )
    for (start, end), sampled in zip(spans, found, strict=True):
        if sampled is None:
            continue
        if sampled.unlearnable:
            raise Refused(f"tokens[{index}][{start}:{end}]: {sampled.unlearnable}")
        if given_T is not None:
            _compare(index, start, given_T[start:end], sampled, sequence)
        sequence.logprob_T[start:end] = sampled.logprobs
        sequence.version_T[start:end] = sampled.versions
        sequence.supports.update(enumerate(sampled.supports, start=start))
    if sequence.supports and len(sequence.supports) != sum(end - start for start, end in spans):
        raise Refused(f"tokens[{index}]: only of some was recorded what top_p, top_k and min_p left")
    return sequence


def runs(trained_T: NDArray[np.bool_]) -> list[Span]:
    """Return the longest stretches that are trained, as (start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], trained_T.astype(np.int8), [0]))))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def versions(sequence: Behaviour, trained_T: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Give each token that was not sampled the version of the one before it; those before the first, of the first."""
    sampled = np.flatnonzero(trained_T)
    if not sampled.size:
        return sequence.version_T
    last_T = np.maximum.accumulate(np.where(trained_T, np.arange(trained_T.size), sampled[0]))
    return sequence.version_T[last_T]


def _temperature(index: int, found: list[SampledCompletion | None], stated: float | None, *, default: float) -> float:
    """The engine knows best; what it does not remember was sampled as the environment says."""
    known = {sampled.temperature for sampled in found if sampled is not None}
    if None in found and stated is not None:
        known.add(stated)
    if len(known) > 1:
        listed = ", ".join(f"{one:g}" for one in sorted(known))
        raise Refused(f"tokens[{index}]: sampled at different temperatures ({listed})")
    return known.pop() if known else default if stated is None else stated


def _compare(
    index: int, start: int, given_T: NDArray[np.float64], sampled: SampledCompletion, sequence: Behaviour
) -> None:
    difference_T = np.abs(given_T - np.clip(sampled.logprobs.astype(np.float64), LOWEST, 0.0))
    if (t := first(~(difference_T <= DIFFERENCE))) is not None:
        raise Refused(
            f"inference_logprobs[{index}][{start + t}]: {given_T[t]:.4g} are not those that were sampled with "
            f"({float(sampled.logprobs[t]):.4g})"
        )
    sequence.difference = max(sequence.difference or 0.0, float(difference_T.max()))
