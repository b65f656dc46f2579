"""Data that the decode engine exchanges with its CPU implementation: prompts, row parameters and sampled tokens.

The engine's GPU implementation (`clotho.inference`) uses the same types.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

BLOCK = 128
"""Tokens per block of two-stage sampling."""

ONE_STAGE = 512
"""Vocabularies up to this size are sampled in one stage."""

COLUMNS_STEP = 256
"""Columns of a large KV cache are a multiple of this number, as in mlx-lm."""

PADDING = 2**32 - 1
"""Fills up rows of an array of supports; never a token identifier."""

PromptState = tuple[tuple[mx.array, ...], ...]
"""The KV cache of a prompt: per layer, (keys, values) of shape (1, heads, tokens, size), or the arrays of a fixed-size
state."""

RouteArray = NDArray[np.unsignedinteger[Any]]
"""Routes of tokens: the numbers of the K experts that compute each in L layers, (T, L, K)."""

T = TypeVar("T")


def undivided(parts: Generator[None, None, T]) -> T:
    """Compute all parts of a step, and return its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


class PrefilledPrompt(NamedTuple):
    """A prompt of `rows` rows with `tokens` computed tokens. reserved: most tokens of a row. state: None for none."""

    rows: int
    tokens: int
    state: PromptState | None
    reserved: int


class DraftedTokens(NamedTuple):
    """The N tokens of a verification: for every row its newest token, then its draft.

    row_N: row of each token, ascending. index_N: index of each token in its row; 0 is the newest sampled token.
    length_B: number of tokens of each row, at least 1.
    """

    token_N: NDArray[np.int32]
    row_N: NDArray[np.int64]
    index_N: NDArray[np.int64]
    length_B: NDArray[np.int64]

    @classmethod
    def of(cls, newest_B: NDArray[np.int32], drafts: Mapping[int, Sequence[int]]) -> DraftedTokens:
        """Arrange the newest token of every row and the drafts of some rows."""
        length_B = np.ones(len(newest_B), dtype=np.int64)
        for row, draft in drafts.items():
            length_B[row] += len(draft)
        row_N = np.repeat(np.arange(len(newest_B)), length_B)
        first_B = np.cumsum(length_B) - length_B
        token_N = np.empty(len(row_N), dtype=np.int32)
        token_N[first_B] = newest_B
        for row, draft in drafts.items():
            first = int(first_B[row]) + 1
            token_N[first : first + len(draft)] = draft
        return cls(token_N, row_N, np.arange(len(row_N)) - first_B[row_N], length_B)

    @property
    def width(self) -> int:
        """Largest number of tokens of a row."""
        return int(self.length_B.max())

    @property
    def first_B(self) -> NDArray[np.int64]:
        """Position of the newest token of every row among the N tokens."""
        first_B: NDArray[np.int64] = np.cumsum(self.length_B) - self.length_B
        return first_B

    def padded(self, value_N: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return one value per token as (B, width), filled up with -1."""
        value_B_T = np.full((len(self.length_B), self.width), -1, dtype=np.int32)
        value_B_T[self.row_N, self.index_N] = value_N
        return value_B_T


class RowAdapter(Protocol):
    """The adapter of a row: evaluated float32 matrices `LAYER.lora_a` and `LAYER.lora_b`, and scales by layer.

    version: a number that no other adapter has; 0 for the base model, which has no matrices.
    """

    @property
    def version(self) -> int:
        """Identifies the adapter."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of matrices and scales; empty for the base model."""

    @property
    def arrays(self) -> Mapping[str, mx.array]:
        """A (inputs, rank) and B (rank, outputs) of every layer."""

    @property
    def scales(self) -> Mapping[str, float]:
        """The absolute scale of every layer."""

    def __hash__(self) -> int: ...


class Filters(NamedTuple):
    """Top-p (infinity = off), top-k (vocabulary size = off) and min-p (0 = off) of the rows that have any of them."""

    row_R: mx.array
    top_p_R: mx.array
    top_k_R: mx.array
    min_p_R: mx.array


class RowLogitBias(NamedTuple):
    """K pairs of a token and the value added to its logit per row, padded with value 0."""

    token_B_K: mx.array
    value_B_K: mx.array


class Reporting(NamedTuple):
    """The rows that report alternatives, or their support, with each token, and the largest number that any reports."""

    row_R: mx.array
    number: int


class CountPenalties(NamedTuple):
    """The R rows with a presence or frequency penalty, in ascending order. presence, frequency: float32."""

    row_R: NDArray[np.int32]
    presence_R: NDArray[np.float32]
    frequency_R: NDArray[np.float32]


class TokenMasks(NamedTuple):
    """The R rows that may not sample every token, ascending. word_R_W: bit i of word w allows token 32 w + i."""

    row_R: NDArray[np.int32]
    word_R_W: NDArray[np.uint32]


class RowParameters(Struct, frozen=True, kw_only=True):
    """Sampling parameters of B rows as arrays; None if no row uses the parameter.

    all_greedy: no row samples at random. greedy_B: the rows that decode greedily, if only some do.
    """

    all_greedy: bool
    greedy_B: mx.array | None = None
    inverse_temperature_B: mx.array | None = None
    filters: Filters | None = None
    penalty_B: mx.array | None = None
    bias: RowLogitBias | None = None
    alternatives: Reporting | None = None
    count_penalties: CountPenalties | None = None
    recording: Reporting | None = None


class Supports(NamedTuple):
    """Tokens that could be sampled in the rows `row_R`: ascending, filled up with `PADDING`, uint32."""

    row_R: mx.array
    token_R_K: mx.array


class SampledRows(NamedTuple):
    """One token per row. `top_*` have shape (B, n), most probable first; None if no row reports alternatives.

    Rows that report none have log-probabilities of minus infinity.
    """

    token_B: mx.array
    logp_B: mx.array
    top_token_B_N: mx.array | None = None
    top_logp_B_N: mx.array | None = None
    supports: Supports | None = None


class RowSampler(Protocol):
    """Samples on the host."""

    def __call__(
        self,
        x_B_V: NDArray[np.float32],
        uniform_B_2: NDArray[np.float32] | None,
        parameters: RowParameters,
        *,
        sampled_R_T: Sequence[NDArray[np.int32]] = (),
        masks: TokenMasks | None = None,
    ) -> SampledRows:
        """Sample as `inference.sampling.sample` does, and overwrite the logits. sampled_R_T: of `count_penalties`."""


def spare_columns(visible: int) -> int:
    """Return how many KV cache columns to allocate in advance; the cache is copied once per that many steps."""
    return max(64, visible // 8)


def rounded_columns(columns: int) -> int:
    """Return the number of columns of a buffer for so many: a multiple of 256, below that a power of two from 64 on.

    MLX reuses a freed buffer only for an array of about the same size. Odd sizes would be returned to the system, and
    fetched from it again, whenever rows join.
    """
    if columns > COLUMNS_STEP // 2:
        return -(-columns // COLUMNS_STEP) * COLUMNS_STEP
    return max(64, 1 << (columns - 1).bit_length())
