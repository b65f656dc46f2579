"""The flat table of a micro-batch's completion tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.compute.layouts.lengths import TOKEN_BUCKET, bucket
from actors.compute.sequences import TokenTable, TrainingSequence

Number = TypeVar("Number", np.int32, np.float32)


def token_table(sequences: Sequence[TrainingSequence], positions: Sequence[NDArray[np.int32]]) -> TokenTable:
    """Concatenate the tokens of all sequences; `positions` are those of their predicting states, (T,) each.

    Either all sequences have supports, or none has. Raises ValueError for a support without any token.
    """
    lengths = [len(sequence.tokens) for sequence in sequences]
    padding = -sum(lengths) % TOKEN_BUCKET

    def row_N(parts: Sequence[NDArray[Number]], *, zero: bool = False) -> NDArray[Number]:
        joined = np.concatenate(parts)
        return np.concatenate([joined, np.full(padding, 0 if zero else joined[0], dtype=joined.dtype)])

    return TokenTable(
        position_N=row_N(positions),
        target_N=row_N([np.asarray(sequence.tokens, dtype=np.int32) for sequence in sequences]),
        sequence_N=row_N([np.full(length, index, dtype=np.int32) for index, length in enumerate(lengths)]),
        behaviour_N=row_N([sequence.behaviour_T for sequence in sequences]),
        version_N=row_N([sequence.version_T for sequence in sequences]),
        advantage_N=row_N([sequence.advantage_T for sequence in sequences]),
        weight_N=row_N([sequence.weight_T for sequence in sequences], zero=True),
        coefficient_N=row_N([sequence.coefficient_T for sequence in sequences], zero=True),
        support_N_K=_supports([s for sequence in sequences for s in sequence.supports], padding),
    )


def _supports(supports: Sequence[bytes], padding: int) -> NDArray[np.int32] | None:
    if not supports:
        return None
    if not all(supports):
        raise ValueError("a recorded support holds at least the token that was drawn")
    rows = [np.frombuffer(support, dtype="<u4") for support in [*supports, *[supports[0]] * padding]]
    support_N_K = np.full((len(rows), bucket(max(map(len, rows)))), -1, dtype=np.int32)
    for row_K, tokens in zip(support_N_K, rows, strict=True):
        row_K[: len(tokens)] = tokens
    return support_N_K
