"""Prompts that several rows have in common: their keys are held once, and read once for all of those rows.

A group of G completions attends to its prompt in one product with G times the queries, instead of G products over G
copies of the keys. Only what a row adds to its prompt stands in columns of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from actors.compute.engine.partial_attention import Partial, attend_to, unseen

NONE = -1


class SharedPrompts:
    """Which rows share which prompt; the same for all layers.

    prompt_B: the row's prompt, or NONE. length_F: tokens of each prompt, those that no row has any more included.
    """

    def __init__(self, rows: int) -> None:
        self.prompt_B = np.full(rows, NONE, dtype=np.int32)
        self.length_F = np.zeros(0, dtype=np.int32)
        self._arranged: Arrangement | None = None

    @property
    def any(self) -> bool:
        """Whether some row shares a prompt."""
        return bool((self.prompt_B != NONE).any())

    @property
    def tokens_B(self) -> NDArray[np.int32]:
        """Tokens of each row that stand in its prompt."""
        if not len(self.length_F):
            return np.zeros(len(self.prompt_B), dtype=np.int32)
        return np.where(self.prompt_B == NONE, 0, self.length_F[self.prompt_B]).astype(np.int32)

    @property
    def arrangement(self) -> Arrangement:
        """How queries of rows become queries of prompts and back."""
        if self._arranged is None:
            self._arranged = Arrangement(self.prompt_B, self.length_F)
        return self._arranged

    def enter(self, slots: Sequence[int], tokens: int) -> int:
        """Let these rows share a prompt; return its place, which may be that of one that no row has any more."""
        self.prompt_B[list(slots)] = NONE
        unused = np.setdiff1d(np.arange(len(self.length_F)), self.prompt_B)
        if len(unused):
            place = int(unused[0])
            self.length_F[place] = tokens
        else:
            place = len(self.length_F)
            self.length_F = np.append(self.length_F, np.int32(tokens))
        self.prompt_B[list(slots)] = place
        self._arranged = None
        return place

    def leave(self, slots: Sequence[int]) -> None:
        """Take note that these slots hold rows with all of their tokens in columns."""
        self.prompt_B[list(slots)] = NONE
        self._arranged = None

    def grow(self, rows: int) -> None:
        """Append slots without a prompt."""
        self.prompt_B = np.append(self.prompt_B, np.full(rows, NONE, dtype=np.int32))
        self._arranged = None

    def take(self, slots: Sequence[int]) -> NDArray[np.int32]:
        """Keep only these slots, and the prompts that they have; return the places of those prompts until now."""
        prompt_B = self.prompt_B[list(slots)]
        kept = np.unique(prompt_B[prompt_B != NONE])
        self.prompt_B = np.where(prompt_B == NONE, NONE, np.searchsorted(kept, prompt_B)).astype(np.int32)
        self.length_F = self.length_F[kept]
        self._arranged = None
        return kept


class Arrangement:
    """Rows by prompt: F prompts with room for M rows each. Where all rows are in that order already, nothing moves."""

    def __init__(self, prompt_B: NDArray[np.int32], length_F: NDArray[np.int32]) -> None:
        F, B = len(length_F), len(prompt_B)
        self.longest = int(length_F.max())
        self.prompts = F
        members = [np.flatnonzero(prompt_B == prompt) for prompt in range(F)]
        self.room = max(len(slots) for slots in members)
        slot_F_M = np.zeros((F, self.room), dtype=np.int32)
        place_B = np.zeros(B, dtype=np.int32)
        for prompt, slots in enumerate(members):
            slot_F_M[prompt, : len(slots)] = slots
            place_B[slots] = prompt * self.room + np.arange(len(slots))
        in_order = F * self.room == B and bool((place_B == np.arange(B)).all()) and bool((prompt_B != NONE).all())
        self._slot_N = None if in_order else mx.array(slot_F_M.reshape(-1))
        self._place_B = None if in_order else mx.array(place_B)
        shares_B = prompt_B != NONE
        self._shares_B_1_1_1 = None if shares_B.all() else mx.array(shares_B[:, None, None, None])
        even = bool((length_F == self.longest).all())
        column_P = np.arange(self.longest)
        mask_F_1_1_P = mx.array((column_P < length_F[:, None])[:, None, None])
        self._hidden_F_1_1_P = None if even else unseen(mask_F_1_1_P)

    def attend(self, queries_B_K_R_D: mx.array, keys_F_K_P_D: mx.array, values_F_K_P_D: mx.array) -> Partial:
        """Attention of every row's scaled queries, R for each of K key heads, over the keys of its prompt."""
        K, R, D = queries_B_K_R_D.shape[1:]
        F, M, P = self.prompts, self.room, self.longest
        queries = queries_B_K_R_D if self._slot_N is None else queries_B_K_R_D[self._slot_N]
        queries_F_K_MR_D = queries.reshape(F, M, K, R * D).swapaxes(1, 2).reshape(F, K, M * R, D)
        found = attend_to(queries_F_K_MR_D, keys_F_K_P_D[:, :, :P], values_F_K_P_D[:, :, :P], self._hidden_F_1_1_P)
        packed = mx.concatenate([*found], axis=-1)
        E = packed.shape[-1]
        packed = packed.reshape(F, K, M, R * E).swapaxes(1, 2).reshape(F * M, K, R, E)
        if self._place_B is not None:
            packed = packed[self._place_B]
        if self._shares_B_1_1_1 is not None:
            nothing_E = mx.array([0.0] * (E - 2) + [-mx.inf, 0.0])
            packed = mx.where(self._shares_B_1_1_1, packed, nothing_E)
        return Partial(packed[..., :-2], packed[..., -2:-1], packed[..., -1:])
