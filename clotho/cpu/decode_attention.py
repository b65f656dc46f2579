"""Attention of one step: one query per row over its columns and, where rows share a prompt, over that.

A group of G rows attends to its prompt in one product with G times the queries, and the prompt's keys are held once.
Scores of both kinds stand side by side, so that there is one softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clotho.cpu.blas import Floats

UNSEEN = -1e30
"""Added to the score of a key that a row does not see."""


class Sharers(NamedTuple):
    """Neighbouring rows that share a prompt of `tokens` tokens. place: of the prompt."""

    place: int
    rows: slice
    tokens: int


class StepAttention:
    """Room for a step's queries, scores and results, used by one layer after the other.

    Axes: K key heads, B rows, R query heads per key head, D size; S scores, of prompts first and then of columns.
    """

    def __init__(
        self,
        shape_K_B_R_D: tuple[int, int, int, int],
        *,
        sharers: list[Sharers],
        columns: int,
        hidden_B_S: Floats | None,
    ) -> None:
        """columns: how many. hidden_B_S: `UNSEEN` where a row does not see a key, else 0; None: all see all."""
        K, B, R, D = shape_K_B_R_D
        longest = max((one.tokens for one in sharers), default=0)
        self.query_K_B_R_D = np.empty(shape_K_B_R_D, np.float32)
        self.result_K_B_R_D = np.empty(shape_K_B_R_D, np.float32)
        self._score_K_B_R_S = np.zeros(
            (K, B, R, longest + columns), np.float32
        )  # what no product writes must be finite
        self._own_K_B_R_C = self._score_K_B_R_S[..., longest:]
        self._hidden_B_1_S = None if hidden_B_S is None else hidden_B_S[:, None]
        self._shared = [
            (
                one.place,
                self.query_K_B_R_D[:, one.rows].reshape(K, -1, D),
                self._score_K_B_R_S[:, one.rows].reshape(K, -1, longest + columns)[..., : one.tokens],
                self.result_K_B_R_D[:, one.rows].reshape(K, -1, D),
            )
            for one in sharers
        ]

    def attend(
        self, keys_K_B_C_D: Floats, values_K_B_C_D: Floats, prompts: dict[int, tuple[Floats, Floats]]
    ) -> tuple[Floats, Floats]:
        """Return sums of values by weight, and the sums of the weights, (K, B, R, 1).

        The queries stand in `query_K_B_R_D`, scaled. prompts: keys and values, (K, tokens, D), by place.
        """
        score_K_B_R_S = self._score_K_B_R_S
        np.matmul(self.query_K_B_R_D, keys_K_B_C_D.swapaxes(-1, -2), out=self._own_K_B_R_C)
        for place, query_K_Q_D, score_K_Q_P, _ in self._shared:
            np.matmul(query_K_Q_D, prompts[place][0].swapaxes(-1, -2), out=score_K_Q_P)
        if self._hidden_B_1_S is not None:
            score_K_B_R_S += self._hidden_B_1_S
        score_K_B_R_S -= score_K_B_R_S.max(axis=-1, keepdims=True)
        np.exp(score_K_B_R_S, out=score_K_B_R_S)
        np.matmul(self._own_K_B_R_C, values_K_B_C_D, out=self.result_K_B_R_D)
        for place, _, score_K_Q_P, result_K_Q_D in self._shared:
            result_K_Q_D += np.matmul(score_K_Q_P, prompts[place][1])
        return self.result_K_B_R_D, score_K_B_R_S.sum(axis=-1, keepdims=True)
