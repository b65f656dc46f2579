"""The flat table of the tokens of a micro-batch that the policy drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from clotho.scoring.layouts.lengths import TOKEN_BUCKET, bucket
from clotho.scoring.sequences import TeacherRows, TokenTable, TrainingSequence

Number = TypeVar("Number", np.int32, np.float32)


def token_table(sequences: Sequence[TrainingSequence], positions: Sequence[NDArray[np.int32]]) -> TokenTable:
    """Concatenate the drawn tokens of all sequences; `positions` are those of their predicting states, (T,) each.

    Either all sequences have supports, or none has; so with reference values and teachers. Raises ValueError for the
    support of a drawn token without any token in it.
    """
    drawn = [np.flatnonzero(_drawn_T(sequence)) for sequence in sequences]
    padding = -sum(map(len, drawn)) % TOKEN_BUCKET

    def row_N(parts: Sequence[NDArray[Number]], *, zero: bool = False) -> NDArray[Number]:
        joined = np.concatenate([part[at] for part, at in zip(parts, drawn, strict=True)])
        return np.concatenate([joined, np.full(padding, 0 if zero else joined[0], dtype=joined.dtype)])

    def same_N(value: float, sequence: TrainingSequence, dtype: type[Number]) -> NDArray[Number]:
        return np.full(len(sequence.tokens), value, dtype=dtype)

    references = [sequence.reference_T for sequence in sequences if sequence.reference_T is not None]
    warm = any(sequence.temperature for sequence in sequences)
    return TokenTable(
        position_N=row_N(positions),
        target_N=row_N([np.asarray(sequence.tokens, dtype=np.int32) for sequence in sequences]),
        sequence_N=row_N([same_N(index, sequence, np.int32) for index, sequence in enumerate(sequences)]),
        behaviour_N=row_N([sequence.behaviour_T for sequence in sequences]),
        version_N=row_N([sequence.version_T for sequence in sequences]),
        advantage_N=row_N([sequence.advantage_T for sequence in sequences]),
        weight_N=row_N([sequence.weight_T for sequence in sequences], zero=True),
        coefficient_N=row_N([sequence.coefficient_T for sequence in sequences], zero=True),
        support_N_K=_supports(sequences, drawn),
        temperature_N=row_N([same_N(s.temperature, s, np.float32) for s in sequences]) if warm else None,
        reference_N=row_N(references) if references else None,
        teacher=_teacher(sequences, drawn, padding),
    )


def _drawn_T(sequence: TrainingSequence) -> NDArray[np.bool_]:
    return np.ones(len(sequence.tokens), dtype=bool) if sequence.drawn_T is None else sequence.drawn_T


def _supports(sequences: Sequence[TrainingSequence], drawn: Sequence[NDArray[np.intp]]) -> NDArray[np.int32] | None:
    supports = [s.supports[t] for s, at in zip(sequences, drawn, strict=True) if s.supports for t in at]
    if not supports:
        return None
    if not all(supports):
        raise ValueError("a recorded support holds at least the token that was drawn")
    padding = -len(supports) % TOKEN_BUCKET
    rows = [np.frombuffer(support, dtype="<u4") for support in [*supports, *[supports[0]] * padding]]
    support_N_K = np.full((len(rows), bucket(max(map(len, rows)))), -1, dtype=np.int32)
    for row_K, tokens in zip(support_N_K, rows, strict=True):
        row_K[: len(tokens)] = tokens
    return support_N_K


def _teacher(
    sequences: Sequence[TrainingSequence], drawn: Sequence[NDArray[np.intp]], padding: int
) -> TeacherRows | None:
    """Put the rows of all teachers one below the other, as wide as the widest."""
    parts = [(s.teacher, at) for s, at in zip(sequences, drawn, strict=True) if s.teacher is not None]
    if not parts:
        return None
    N, K = sum(len(at) for _, at in parts) + padding, max(teacher.token_T_K.shape[1] for teacher, _ in parts)
    rows = TeacherRows(np.full((N, K), -1, dtype=np.int32), np.zeros((N, K), dtype=np.float32))
    start = 0
    for teacher, at in parts:
        for row_N_K, part_T_K in zip(rows, teacher, strict=True):
            row_N_K[start : start + len(at), : part_T_K.shape[1]] = part_T_K[at]
        start += len(at)
    return rows
