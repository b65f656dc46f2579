"""Which tokens the rows of a batch may sample at a step.

A mask is a row of 32-bit words with one bit per token, computed on the host. An exclusion that would leave no token
does not apply: the end token that completes a constraint is sampled before `min_tokens` if nothing else is possible.
A mask that cannot be computed fails its own row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from clotho.inference.rows import TokenMasks
from clotho.inference.scheduler import Row


class MaskedRows:
    """The rows of a batch that cannot sample every token at every step.

    needs_tokens: whether the mask of a row depends on its last tokens, which must have been read before the next step.
    """

    def __init__(
        self,
        rows: Sequence[Row | None],
        end_tokens: Collection[int],
        vocabulary: int,
        failed: list[tuple[Row, Exception]],
    ) -> None:
        """rows: by slot. failed: receives the rows whose mask cannot be computed, which may sample every token."""
        masked = [(slot, row) for slot, row in enumerate(rows) if row is not None and row.is_masked]
        self.needs_tokens = any(row.constraint or row.active.request.sampling.bad_words for _, row in masked)
        self._failed = failed
        self._rows = [(slot, row, _RowMask(row, end_tokens, vocabulary)) for slot, row in masked]

    def at_step(
        self, live: NDArray[np.bool_], launched: NDArray[np.int64], tokens_of: Callable[[int], NDArray[np.int32]]
    ) -> TokenMasks | None:
        """Return the masks of the next step; None without any. live, launched: by slot. tokens_of: a slot's tokens."""
        slots, masks = [], []
        for slot, row, row_mask in self._rows:
            if not live[slot]:
                continue
            try:
                mask = row_mask.at_step(int(launched[slot]), partial(tokens_of, slot))
            except Exception as error:
                self._failed.append((row, error))
                continue
            if mask is not None:
                slots.append(slot)
                masks.append(mask)
        return TokenMasks(np.array(slots, dtype=np.int32), np.stack(masks)) if slots else None


class _RowMask:
    def __init__(self, row: Row, end_tokens: Collection[int], vocabulary: int) -> None:
        sampling = row.active.request.sampling
        self._constraint = row.constraint
        self._bad_words = sampling.bad_words
        self._min_tokens = sampling.min_tokens
        self._full_W = _full(vocabulary)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_tokens)}
        self._not_end_W = self._without([token for token in ends if token < vocabulary])
        allowed = sampling.allowed_token_ids
        self._allowed_W = self._full_W & ~self._without(allowed) if allowed else None

    def at_step(self, launched: int, tokens: Callable[[], NDArray[np.int32]]) -> NDArray[np.uint32] | None:
        """Return the mask before token `launched` of the completion; None if every token may be sampled."""
        mask_W = self._allowed_W
        if self._constraint is not None:
            mask_W = self._of_bits(self._constraint.allowed())
        if self._bad_words and (last := self._completing(tokens().tolist())):
            mask_W = self._exclude(mask_W, self._without(last))
        if launched < self._min_tokens:
            mask_W = self._exclude(mask_W, self._not_end_W)
        return mask_W

    def _of_bits(self, bits: bytes) -> NDArray[np.uint32]:
        """Return the mask of a constraint, which may have words behind the vocabulary. Raises ValueError if empty."""
        mask_W: NDArray[np.uint32] = np.frombuffer(bits, dtype="<u4", count=len(self._full_W)) & self._full_W
        if not mask_W.any():
            raise ValueError("no token may follow")
        return mask_W

    def _completing(self, tokens: list[int]) -> list[int]:
        """Return the tokens that would complete a bad word."""
        return [
            word[-1]
            for word in self._bad_words
            if len(word) <= len(tokens) + 1 and tokens[len(tokens) + 1 - len(word) :] == list(word[:-1])
        ]

    def _exclude(self, mask_W: NDArray[np.uint32] | None, kept_W: NDArray[np.uint32]) -> NDArray[np.uint32]:
        mask_W = self._full_W if mask_W is None else mask_W
        both_W: NDArray[np.uint32] = mask_W & kept_W
        return both_W if both_W.any() else mask_W

    def _without(self, tokens: Collection[int]) -> NDArray[np.uint32]:
        """Return the mask that excludes `tokens`."""
        mask_W = self._full_W.copy()
        token_N = np.array(sorted(set(tokens)), dtype=np.uint32)
        np.bitwise_and.at(mask_W, token_N >> np.uint32(5), ~(np.uint32(1) << (token_N & np.uint32(31))))
        return mask_W


def _full(vocabulary: int) -> NDArray[np.uint32]:
    """Return the mask of all tokens; the bits behind the vocabulary are not set."""
    mask_W = np.full((vocabulary + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)
    mask_W[-1] >>= np.uint32(-vocabulary % 32)
    return mask_W
