"""Attention of a decode step in NumPy, over the KV cache columns of the rows and the prompts that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attachments.cpu.blas import Floats
from clotho.inference.row_runs import RowRun
from clotho.inference.rows import DraftedTokens


class SharedPrompt(NamedTuple):
    """Neighbouring rows that share the KV cache of a prompt of `tokens` tokens. key: of the prompt."""

    key: int
    rows: slice
    tokens: int


class AttentionRun(NamedTuple):
    """A run of rows, which attend to their columns and to the prompts that they share.

    shared: groups of these rows. mask_B_Q_S: `MASKED_SCORE` at keys that a query cannot attend to, else 0; prompts
    first, then columns; Q is R, or 1 for all queries. None: every query attends to every key.
    """

    run: RowRun
    shared: list[SharedPrompt]
    mask_B_Q_S: Floats | None


class RunAttention:
    """Attention of a run of rows: its views of the queries and results of a step, and its scores.

    Scores of prompts and columns are contiguous, so that one softmax normalises them.
    """

    def __init__(
        self, one: AttentionRun, query_K_B_R_D: Floats, result_K_B_R_D: Floats, weight_K_B_R_1: Floats
    ) -> None:
        (self._rows, self._columns), self._mask_B_Q_S = one.run, one.mask_B_Q_S
        self._query_K_B_R_D, self._result_K_B_R_D = query_K_B_R_D[:, self._rows], result_K_B_R_D[:, self._rows]
        self._weight_K_B_R_1 = weight_K_B_R_1[:, self._rows]
        K, B, R, D = self._query_K_B_R_D.shape
        longest = max((prompt.tokens for prompt in one.shared), default=0)
        # Zeros, because scores that no product writes must be finite.
        self._score_K_B_R_S = np.zeros((K, B, R, longest + self._columns), np.float32)
        self._column_score_K_B_R_C = self._score_K_B_R_S[..., longest:]
        self._shared = []
        for key, rows, tokens in one.shared:
            mine = slice(rows.start - self._rows.start, rows.stop - self._rows.start)
            score_K_Q_S = self._score_K_B_R_S[:, mine].reshape(K, -1, longest + self._columns)
            query_K_Q_D, result_K_Q_D = query_K_B_R_D[:, rows].reshape(K, -1, D), result_K_B_R_D[:, rows]
            self._shared.append((key, query_K_Q_D, score_K_Q_S[..., :tokens], result_K_Q_D.reshape(K, -1, D)))

    def attend(self, keys_K_B_C_D: Floats, values_K_B_C_D: Floats, prompts: dict[int, tuple[Floats, Floats]]) -> None:
        """Write the weighted sums of values, and the sums of the weights."""
        newest = slice(keys_K_B_C_D.shape[2] - self._columns, None)
        keys_K_B_C_D, values_K_B_C_D = keys_K_B_C_D[:, self._rows, newest], values_K_B_C_D[:, self._rows, newest]
        score_K_B_R_S = self._score_K_B_R_S
        np.matmul(self._query_K_B_R_D, keys_K_B_C_D.swapaxes(-1, -2), out=self._column_score_K_B_R_C)
        for key, query_K_Q_D, score_K_Q_P, _ in self._shared:
            np.matmul(query_K_Q_D, prompts[key][0].swapaxes(-1, -2), out=score_K_Q_P)
        if self._mask_B_Q_S is not None:
            score_K_B_R_S += self._mask_B_Q_S
        score_K_B_R_S -= score_K_B_R_S.max(axis=-1, keepdims=True)
        np.exp(score_K_B_R_S, out=score_K_B_R_S)
        np.matmul(self._column_score_K_B_R_C, values_K_B_C_D, out=self._result_K_B_R_D)
        for key, _, score_K_Q_P, result_K_Q_D in self._shared:
            result_K_Q_D += np.matmul(score_K_Q_P, prompts[key][1])
        np.sum(score_K_B_R_S, axis=-1, keepdims=True, out=self._weight_K_B_R_1)


class DecodeAttention:
    """Attention of one decode step: one query per row over its KV cache columns and over the prompt it shares.

    Rows are divided into runs of similar length (`AttentionRun`), so that short rows do not compute the columns of long
    ones. G rows of a run that share a prompt attend to it in one matrix product with G times the queries, and its keys
    are stored once (Hydragen, arXiv:2402.05099). The buffers for queries, scores and results are reused by all layers.

    Axes: K key heads, B rows, R query heads per key head, D size; S scores, of shared prompts first, then of columns.
    """

    def __init__(self, shape_K_B_R_D: tuple[int, int, int, int], runs: Sequence[AttentionRun]) -> None:
        K, B, R, _ = shape_K_B_R_D
        self.query_K_B_R_D = np.empty(shape_K_B_R_D, np.float32)
        self.result_K_B_R_D = np.empty(shape_K_B_R_D, np.float32)
        self._weight_K_B_R_1 = np.empty((K, B, R, 1), np.float32)
        self._runs = [RunAttention(one, self.query_K_B_R_D, self.result_K_B_R_D, self._weight_K_B_R_1) for one in runs]

    def attend(
        self, keys_K_B_C_D: Floats, values_K_B_C_D: Floats, prompts: dict[int, tuple[Floats, Floats]]
    ) -> tuple[Floats, Floats]:
        """Return the weighted sums of values and the sums of the weights, (K, B, R, 1).

        Reads the scaled queries from `query_K_B_R_D`. prompts: keys and values, (K, tokens, D), by `SharedPrompt.key`.
        """
        for run in self._runs:
            run.attend(keys_K_B_C_D, values_K_B_C_D, prompts)
        return self.result_K_B_R_D, self._weight_K_B_R_1

    def put_queries(self, queries_B_K_R_D: Floats, scale: np.float32) -> None:
        """Store the scaled queries of the step."""
        np.multiply(queries_B_K_R_D.transpose(1, 0, 2, 3), scale, out=self.query_K_B_R_D)

    def write(self, columns_K_B_C_D: Floats, new_B_K_D: NDArray[Any]) -> None:
        """Write the new keys, values or routes of the step into its columns."""
        columns_K_B_C_D[:, :, -1] = new_B_K_D.transpose(1, 0, 2)

    def divide(self, sum_K_B_R_D: Floats, weight_K_B_R_1: Floats, out_B_K_R_D: Floats) -> None:
        """Write the quotients of the results of `attend` to `out`."""
        np.divide(sum_K_B_R_D, weight_K_B_R_1, out=out_B_K_R_D.transpose(1, 0, 2, 3))


class VerifyAttention(DecodeAttention):
    """Attention of a verification: T queries per row, of its newest token and its draft.

    The T x R queries of a row and a key head are those of one token; rows with shorter drafts have unused queries. A
    row writes into columns of its own. N tokens are computed, as listed in `DraftedTokens`.
    """

    def __init__(
        self,
        shape_K_B_R_D: tuple[int, int, int, int],
        tokens: DraftedTokens,
        *,
        shared: list[SharedPrompt],
        columns: int,
        start_B: NDArray[np.int64],
        mask_B_T_S: Floats,
    ) -> None:
        """start_B: column of the newest token of each row, counted from the first visible column."""
        (K, B, R, D), T = shape_K_B_R_D, tokens.width
        mask_B_Q_S = np.repeat(mask_B_T_S, R, axis=1)
        super().__init__((K, B, T * R, D), [AttentionRun(RowRun(slice(0, B), columns), shared, mask_B_Q_S)])
        self.query_K_B_R_D[:] = 0.0
        self._shape_K_B_T_R_D = (K, B, T, R, D)
        self._row_N, self._index_N = tokens.row_N, tokens.index_N
        self._column_N = start_B[tokens.row_N] + tokens.index_N

    def put_queries(self, queries_B_K_R_D: Floats, scale: np.float32) -> None:
        """Store the scaled queries of the N tokens."""
        query_K_B_T_R_D = self.query_K_B_R_D.reshape(self._shape_K_B_T_R_D)
        query_K_B_T_R_D[:, self._row_N, self._index_N] = queries_B_K_R_D.transpose(1, 0, 2, 3) * scale

    def write(self, columns_K_B_C_D: Floats, new_B_K_D: NDArray[Any]) -> None:
        """Write the new keys, values or routes of the N tokens into the columns of their rows."""
        columns_K_B_C_D[:, self._row_N, self._column_N] = new_B_K_D.transpose(1, 0, 2)

    def divide(self, sum_K_B_R_D: Floats, weight_K_B_R_1: Floats, out_B_K_R_D: Floats) -> None:
        """Write the quotients of the N tokens to `out`."""
        quotient_K_B_T_R_D = (sum_K_B_R_D / weight_K_B_R_1).reshape(self._shape_K_B_T_R_D)
        out_B_K_R_D[:] = quotient_K_B_T_R_D[:, self._row_N, self._index_N].transpose(1, 0, 2, 3)
