"""Pack scored groups into padded micro-batches, on the host, the same way every time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from protocols.sampling import Completion
from protocols.score import ScoredGroup

Number = TypeVar("Number", np.int32, np.float32)

TOKEN_BUCKET = 64
"""The completion tokens of a micro-batch are padded to a multiple of this."""


class MicroBatch(NamedTuple):
    """Sequences that go through the model together, and their completion tokens in one flat row of length N.

    tokens_B_S: prompt and completion without its last token, padded with 0 on the right. lengths_B: without padding.
    position_N: row * S + column of the input whose logits predict the token; target_N: the token.
    behaviour_N, version_N: its recorded log-probability and weights' version. advantage_N: of its completion.
    weight_N: 1; 0 for padding, which repeats the first token so that it is as finite as that one.
    """

    tokens_B_S: NDArray[np.int32]
    lengths_B: NDArray[np.int32]
    position_N: NDArray[np.int32]
    target_N: NDArray[np.int32]
    behaviour_N: NDArray[np.float32]
    version_N: NDArray[np.int32]
    advantage_N: NDArray[np.float32]
    weight_N: NDArray[np.float32]


class Batch(Struct, frozen=True, kw_only=True):
    """All micro-batches of one update; `tokens` counts their completion tokens, padding excluded."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int


class _Sequence(NamedTuple):
    prompt: tuple[int, ...]
    completion: Completion
    advantage: float

    @property
    def inputs(self) -> int:
        return len(self.prompt) + len(self.completion.tokens) - 1


def bucket(length: int) -> int:
    """Round a length up to one of at most 16 sizes per octave: a multiple of 8, at least; padding below 1/8."""
    granularity = max(8, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // granularity) * granularity


def build_batch(groups: Sequence[ScoredGroup], advantages: Sequence[Sequence[float]], *, budget: int) -> Batch:
    """Sort all completions by length and cut them into micro-batches of at most `budget` padded tokens.

    A sequence longer than the budget gets a micro-batch of its own. Empty completions are left out.
    Equal input gives equal output. Raises ValueError if there is no completion token at all.
    """
    sequences = [
        _Sequence(scored.group.prompt.tokens, completion, float(advantage))
        for scored, advantages_G in zip(groups, advantages, strict=True)
        for completion, advantage in zip(scored.group.completions, advantages_G, strict=True)
        if completion.tokens
    ]
    if not sequences:
        raise ValueError("an update needs at least one completion token")
    sequences.sort(key=lambda sequence: -sequence.inputs)
    return Batch(
        micro_batches=tuple(_pad(part) for part in _cut(sequences, budget)),
        tokens=sum(len(sequence.completion.tokens) for sequence in sequences),
    )


def _cut(sequences: Sequence[_Sequence], budget: int) -> Iterator[Sequence[_Sequence]]:
    """Cut sequences, longest first, into runs whose first one times their number fits the budget."""
    start = 0
    while start < len(sequences):
        rows = max(1, budget // bucket(sequences[start].inputs))
        yield sequences[start : start + rows]
        start += rows


def _pad(sequences: Sequence[_Sequence]) -> MicroBatch:
    S = bucket(max(sequence.inputs for sequence in sequences))
    tokens_B_S = np.zeros((len(sequences), S), dtype=np.int32)
    position_N: list[int] = []
    for row, (prompt, completion, _) in enumerate(sequences):
        inputs = (prompt + completion.tokens)[:-1]
        tokens_B_S[row, : len(inputs)] = inputs
        position_N.extend(range(row * S + len(prompt) - 1, row * S + len(inputs)))
    completions = [sequence.completion for sequence in sequences]
    lengths = [len(completion.tokens) for completion in completions]
    N = len(position_N)
    padding = -N % TOKEN_BUCKET

    def row_N(values: Sequence[float], dtype: type[Number]) -> NDArray[Number]:
        return np.asarray([*values, *[values[0]] * padding], dtype=dtype)

    return MicroBatch(
        tokens_B_S=tokens_B_S,
        lengths_B=np.asarray([sequence.inputs for sequence in sequences], dtype=np.int32),
        position_N=row_N(position_N, np.int32),
        target_N=row_N([token for c in completions for token in c.tokens], np.int32),
        behaviour_N=row_N([logp for c in completions for logp in c.logprobs], np.float32),
        version_N=row_N([version for c in completions for version in c.versions], np.int32),
        advantage_N=row_N(np.repeat([sequence.advantage for sequence in sequences], lengths).tolist(), np.float32),
        weight_N=np.concatenate([np.ones(N, dtype=np.float32), np.zeros(padding, dtype=np.float32)]),
    )
