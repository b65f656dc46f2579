"""How the rows of the engine share the KV cache: a batch of short rows, and a batch of the long rows of clients.

The KV cache of a batch is a rectangle: every row takes as many columns as the longest one, so that one long row beside
many short ones takes almost all of it. Rows of clients that have become long are therefore decoded in a batch of their
own, with columns of its own. Only sizes are decided here; `clotho.inference.scheduler` orders the requests.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.nn as nn

from clotho.inference.cache_layout import AttentionLeaf, CacheLayout
from clotho.models.parameters import flat

MARGIN = 128
"""Tokens that are reserved for a row of a client beyond those that it has, up to its maximum."""

SHORT_TOKENS = 256
"""A client's row for which at most so many tokens are reserved is short, whatever the model and the rollouts."""

SHORT_SHARE = 16
"""A row is short if reading its KV cache takes at most this fraction of the time of reading the weights (1/16)."""

OUTLIER = 2
"""While the KV cache has no room for a short row, rows of clients that reserve more than this many times as much are
long."""

LARGEST_SHARE = 8
"""One request of a client leaves this fraction of the KV cache to all others (1/8)."""


class Load(NamedTuple):
    """The rows of a batch. longest: number of tokens that are reserved for the longest one, and so for each.

    background: how many of the rows belong to background requests. most: largest number of tokens that a row can have
    at its end. movable: largest number of tokens that are reserved for a row that can leave the batch; 0 if there is
    none. A row of a client can leave the short rows at any time, and the long rows once it has used up what was
    reserved on its admission.
    """

    rows: int = 0
    longest: int = 0
    background: int = 0
    most: int = 0
    movable: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the rows reserve together."""
        return self.rows * self.longest

    def plus(self, rows: int, longest: int, most: int, *, background: bool) -> Load:
        """Return the load with more rows."""
        return Load(
            rows=self.rows + rows,
            longest=max(self.longest, longest),
            background=self.background + (rows if background else 0),
            most=max(self.most, most),
            movable=self.movable,
        )


class Loads(NamedTuple):
    """The short rows, and the long rows."""

    short: Load = Load()
    long: Load = Load()

    def of(self, *, is_long: bool) -> Load:
        """Return the load of one of the two batches."""
        return self.long if is_long else self.short

    @property
    def of_clients(self) -> int:
        """Tokens that rows of clients hold, each as much as the longest of its batch."""
        return (self.short.rows - self.short.background) * self.short.longest + self.long.tokens

    def plus(self, rows: int, longest: int, most: int, *, is_long: bool, background: bool) -> Loads:
        """Return the loads with more rows in one of the two batches."""
        more = self.of(is_long=is_long).plus(rows, longest, most, background=background)
        return self._replace(long=more) if is_long else self._replace(short=more)


class Waiting(NamedTuple):
    """Tokens that a row of the first waiting job of each batch reserves; 0 if no job waits."""

    short: int = 0
    long: int = 0


class KVBudget:
    """Divides `engine.kv_cache_tokens`: no batch takes all of it for good, and no row is admitted that does not fit.

    While short rows run or wait, long rows of clients hold at most `clients`; one alone can hold up to `largest`. Short
    rows leave as much of that part as the long rows can use. If the two batches exclude each other, because a single
    row of each does not fit into the KV cache at the same time, they take turns.

    clients: tokens for long rows: the share that `engine.rollout_share` leaves them, at least an equal part of one row.
    short: maximum number of tokens that are reserved for a short row.
    """

    def __init__(self, tokens: int, rollout_share: float, max_num_seqs: int, *, short: int = SHORT_TOKENS) -> None:
        """tokens: `engine.kv_cache_tokens`."""
        self.clients = max(tokens - int(tokens * rollout_share), tokens // max_num_seqs)
        self.short = short
        self._tokens = tokens
        self._long_was_last = False

    @property
    def largest(self) -> int:
        """Maximum number of tokens of a row of a client; all tokens if even such a row is short."""
        return max(self._tokens - self._tokens // LARGEST_SHARE, min(self._tokens, self.short))

    def room(self, length: int, loads: Loads, waiting: Waiting, *, is_long: bool) -> int:
        """Return how many more rows of `length` tokens fit into the batch of short rows, or of long rows."""
        short, long = loads
        length = max(length, loads.of(is_long=is_long).longest)
        if not is_long:
            return (self._tokens - self._held_by_long(loads, waiting)) // length - short.rows
        held = waiting.short if not short.rows and self._long_was_last else 0
        rows = (self._tokens - max(short.tokens, held)) // length
        if short.rows or waiting.short:
            rows = min(rows, max(1, self.clients // length))
        return rows - long.rows

    def _held_by_long(self, loads: Loads, waiting: Waiting) -> int:
        """Return the tokens that short rows leave to long ones."""
        short, long = loads
        first = 0 if long.rows or self._long_was_last else waiting.long
        return max(long.tokens, first, self._part_of_long(loads) if short.rows else 0)

    def _part_of_long(self, loads: Loads) -> int:
        """Return how many tokens the running long rows can use at most."""
        return min(self.clients, loads.long.rows * loads.long.most)

    def limits(self, loads: Loads) -> tuple[int, int]:
        """Return how many tokens the buffers of short and of long rows may have room for."""
        short, long = loads
        if not long.rows:
            return self._tokens, self.clients
        part = max(long.tokens, min(self._part_of_long(loads), self._tokens - short.tokens))
        return self._tokens - part, part

    def admitted(self, *, is_long: bool) -> None:
        """Record an admission: the next one belongs to the other batch if they exclude each other."""
        self._long_was_last = is_long

    def short_limit(self, blocked: int) -> int:
        """Return the most tokens of a short row of a client. blocked: reserved by a short row without room; 0: none."""
        return min(self.short, OUTLIER * blocked) if blocked else self.short

    def short_must_leave(self, loads: Loads, blocked: int) -> bool:
        """Whether a row of a client has become too long for the batch of short rows. blocked: see `short_limit`."""
        short, long = loads
        most = self._tokens - min(long.tokens, max(self.clients, long.longest))
        return short.movable > self.short_limit(blocked) or (short.movable > 0 and short.tokens > most)

    def long_must_leave(self, loads: Loads, waiting: Waiting) -> bool:
        """Whether the long rows have outgrown their part of the KV cache."""
        short, long = loads
        shared = bool(short.rows or waiting.short)
        exceeds = long.tokens > self._tokens - short.tokens or (shared and long.rows > 1 and long.tokens > self.clients)
        return exceeds and long.movable > 0


def short_tokens(model: nn.Module, layout: CacheLayout) -> int:
    """Return how many tokens are reserved for a short row at most: those whose KV cache is small beside the weights."""
    token = sum(leaf.held_bytes for leaf in layout.leaves if isinstance(leaf, AttentionLeaf) and leaf.window is None)
    weights = sum(array.nbytes for array in flat(model.parameters()).values())
    return max(SHORT_TOKENS, weights // max(1, token) // SHORT_SHARE)
