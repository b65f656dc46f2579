"""What the host knows of the running rows: NumPy arrays by slot, written a whole step at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clotho.inference.scheduler import Row

FIRST_COLUMNS = 64


class Ledger:
    """Slots of the running batch. A slot without a row has serial 0.

    positions: tokens in the row's cache once every step launched so far is done. launched, sampled: tokens asked of the
    device, and tokens read. limit: tokens the row may have. heeds_end: the model's end tokens end it.
    attentive: the host looks at every token of the row.
    reserved: the most tokens the row and its prompt can come to.
    """

    def __init__(self, end_tokens: frozenset[int], vocabulary: int) -> None:
        self.rows: list[Row | None] = []
        self._is_end_V = np.zeros(vocabulary, dtype=np.bool_)
        self._is_end_V[[t for t in end_tokens if 0 <= t < vocabulary]] = True
        self.serial = np.zeros(0, dtype=np.int64)
        self.seed = np.zeros(0, dtype=np.uint64)
        self.positions = np.zeros(0, dtype=np.int32)
        self.launched = np.zeros(0, dtype=np.int64)
        self.sampled = np.zeros(0, dtype=np.int64)
        self.limit = np.zeros(0, dtype=np.int64)
        self.heeds_end = np.zeros(0, dtype=np.bool_)
        self.attentive = np.zeros(0, dtype=np.bool_)
        self.reserved = np.zeros(0, dtype=np.int64)
        self._token = np.zeros((0, FIRST_COLUMNS), dtype=np.int32)
        self._logprob = np.zeros((0, FIRST_COLUMNS), dtype=np.float32)
        self._version = np.zeros((0, FIRST_COLUMNS), dtype=np.int64)

    @property
    def live(self) -> NDArray[np.bool_]:
        """Which slots hold a row."""
        return self.serial > 0

    @property
    def running(self) -> int:
        """How many slots hold a row."""
        return int(np.count_nonzero(self.serial))

    @property
    def longest(self) -> int:
        """Tokens in the longest row's cache."""
        return int(self.positions.max(initial=0, where=self.live))

    @property
    def longest_reserved(self) -> int:
        """The most tokens that any row can come to."""
        return int(self.reserved.max(initial=0, where=self.live))

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        for name in self._by_slot():
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((rows, *array.shape[1:]), dtype=array.dtype)]))
        self.rows.extend([None] * rows)

    def take(self, slots: Sequence[int]) -> None:
        """Keep only these slots, in this order."""
        for name in self._by_slot():
            setattr(self, name, getattr(self, name)[list(slots)])
        self.rows = [self.rows[slot] for slot in slots]

    def _by_slot(self) -> tuple[str, ...]:
        names = ("serial", "seed", "positions", "launched", "sampled", "limit", "heeds_end", "attentive", "reserved")
        return (*names, "_token", "_logprob", "_version")

    def enter(self, slot: int, row: Row, tokens: int) -> None:
        """Put a row with `tokens` tokens in its cache into a free slot; what it drew before an interruption counts."""
        request, before = row.asked.request, len(row.tokens)
        self.rows[slot] = row
        self.serial[slot], self.seed[slot] = row.serial, request.seeds[row.index]
        self.positions[slot], self.reserved[slot] = tokens, row.asked.reserved
        self.launched[slot] = self.sampled[slot] = before
        self.limit[slot], self.heeds_end[slot] = row.asked.limit, not request.sampling.ignore_eos
        self.attentive[slot] = row.attentive
        self._reserve_columns(before)
        self._token[slot, :before], self._logprob[slot, :before] = row.tokens, row.logprobs
        self._version[slot, :before] = row.versions

    def leave(self, slot: int) -> Row:
        """Free a slot; the row takes along what it has sampled."""
        row, sampled = self.rows[slot], int(self.sampled[slot])
        if row is None:
            raise ValueError(f"slot {slot} holds no row")
        row.tokens = self._token[slot, :sampled].tolist()
        row.logprobs = self._logprob[slot, :sampled].tolist()
        row.versions = self._version[slot, :sampled].tolist()
        self.rows[slot], self.serial[slot], self.positions[slot] = None, 0, 0
        return row

    def tokens_of(self, slot: int) -> list[int]:
        """Return what the row in `slot` has sampled so far."""
        return [int(t) for t in self._token[slot, : self.sampled[slot]]]

    def record(
        self, slots: NDArray[np.int64], token_N: NDArray[np.int32], logp_N: NDArray[np.float32], version: int
    ) -> NDArray[np.bool_]:
        """Write one sampled token per slot; say which rows end with it, by the model's end tokens or by length."""
        at_N = self.sampled[slots]
        self._reserve_columns(int(at_N.max()) + 1)
        self._token[slots, at_N], self._logprob[slots, at_N], self._version[slots, at_N] = token_N, logp_N, version
        self.sampled[slots] = at_N + 1
        ended_N: NDArray[np.bool_] = self.is_end(slots, token_N) | (at_N + 1 >= self.limit[slots])
        return ended_N

    def is_end(self, slots: NDArray[np.int64], token_N: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Say which tokens are end tokens of the model to rows that heed them."""
        end_N: NDArray[np.bool_] = self._is_end_V[token_N] & self.heeds_end[slots]
        return end_N

    def _reserve_columns(self, columns: int) -> None:
        have = self._token.shape[1]
        if columns <= have:
            return
        extra = ((0, 0), (0, max(columns - have, have)))
        self._token, self._logprob = np.pad(self._token, extra), np.pad(self._logprob, extra)
        self._version = np.pad(self._version, extra)
