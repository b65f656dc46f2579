"""Decoding a plain pre-norm transformer (Llama, Qwen2, Qwen3) in NumPy: one token for every row of a batch per step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from attachments.cpu.adapter_segments import Arrangement, GroupLowRank
from attachments.cpu.blas import Floats, Matrix, matrix
from attachments.cpu.decoder_layers import (
    LowRankBuffers,
    ParameterVector,
    Projection,
    ProjectionGroup,
    RMSNorm,
    TiedHead,
    WeightMatrix,
    as_numpy,
    empty,
    inverse_rms,
    projections,
    rotate,
    swiglu_in_place,
)
from attachments.cpu.layers import rope_frequencies
from clotho.inference.row_runs import RowRun
from clotho.inference.rows import DraftedTokens, RowAdapter


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

    def write(self, columns_K_B_C_D: Floats, new_B_K_D: Floats) -> None:
        """Write the new keys, or the new values, of the step into its columns."""
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

    def write(self, columns_K_B_C_D: Floats, new_B_K_D: Floats) -> None:
        """Write the new keys, or the new values, of the N tokens into the columns of their rows."""
        columns_K_B_C_D[:, self._row_N, self._column_N] = new_B_K_D.transpose(1, 0, 2)

    def divide(self, sum_K_B_R_D: Floats, weight_K_B_R_1: Floats, out_B_K_R_D: Floats) -> None:
        """Write the quotients of the N tokens to `out`."""
        quotient_K_B_T_R_D = (sum_K_B_R_D / weight_K_B_R_1).reshape(self._shape_K_B_T_R_D)
        out_B_K_R_D[:] = quotient_K_B_T_R_D[:, self._row_N, self._index_N].transpose(1, 0, 2, 3)


class LayerCaches(NamedTuple):
    """KV caches per layer: visible columns (K, B, C, D), the last one not yet written, and shared prompts by key."""

    attention: DecodeAttention
    columns: list[tuple[Floats, Floats]]
    prompts: list[dict[int, tuple[Floats, Floats]]]


class StepBuffers(NamedTuple):
    """Buffers of a decode step of B rows, reused by all blocks.

    heads: queries, keys and values of all heads. parts: views of the three in it.
    """

    x: Matrix
    normed: Matrix
    heads: Matrix
    parts: list[Matrix]
    attended: Matrix
    gate: Matrix
    up: Matrix
    low_rank: LowRankBuffers
    spare_B_F: Floats


class DecoderBlock:
    """The layers of one transformer block."""

    def __init__(self, block: Any, name: str) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.heads, self.key_heads = attention.n_heads, attention.n_kv_heads
        self.before_attention, self.before_mlp = RMSNorm(block.input_layernorm), RMSNorm(block.post_attention_layernorm)
        self.qkv = projections(attention, f"{name}.self_attn", "q_proj", "k_proj", "v_proj")
        self.output = projections(attention, f"{name}.self_attn", "o_proj")
        self.gate_up = projections(mlp, f"{name}.mlp", "gate_proj", "up_proj")
        self.down = projections(mlp, f"{name}.mlp", "down_proj")
        self.scale = np.float32(attention.scale)
        self.head_norm: ParameterVector | None = None
        if "q_norm" in attention:
            parts = ((attention.q_norm, "weight", self.heads), (attention.k_norm, "weight", self.key_heads))
            self.head_norm, self.eps = ParameterVector(*parts), float(attention.q_norm.eps)


class HostDecoder:
    """Decodes a model that `supported` supports. key_shape: (key heads, size). depth: number of blocks."""

    def __init__(self, model: nn.Module) -> None:
        inner: Any = model.model
        self._blocks = [DecoderBlock(block, f"model.layers.{n}") for n, block in enumerate(inner.layers)]
        self._norm = RMSNorm(inner.norm)
        self._embeddings = WeightMatrix(inner.embed_tokens, "weight", transposed=True)
        self._head: ProjectionGroup | TiedHead = TiedHead(self._embeddings, inner.embed_tokens)
        if "lm_head" in model:
            self._head = ProjectionGroup(Projection(model.lm_head, "lm_head"))
        attention = inner.layers[0].self_attn
        rope: Any = attention.rope
        self._frequency_H = as_numpy(rope_frequencies(rope.dims, rope.base)) * np.float32(rope.scale)
        self.depth = len(self._blocks)
        self.key_shape: tuple[int, int] = (attention.n_kv_heads, rope.dims)
        self._repeats = attention.n_heads // attention.n_kv_heads
        self._buffers: StepBuffers | None = None
        self._arrangement: Arrangement | None = None
        self._arranged_B: Sequence[RowAdapter | None] = ()
        self._matrices: WeakKeyDictionary[RowAdapter, dict[str, GroupLowRank]] = WeakKeyDictionary()

    def query_shape(self, rows: int) -> tuple[int, int, int, int]:
        """Return the shape of the queries of `rows` rows, (K, B, R, D)."""
        heads, size = self.key_shape
        return heads, rows, self._repeats, size

    @contextmanager
    def computing(self, adapter_B: Sequence[RowAdapter | None]) -> Iterator[None]:
        """Decode inside the context: row b uses adapter_B[b]; None for the policy.

        adapter_B is not modified later: the same object stands for the same adapters.
        """
        buffers = self._buffers_for(len(adapter_B))
        if self._arrangement is None or adapter_B is not self._arranged_B:
            key = tuple(0 if adapter is None else adapter.version or -1 for adapter in adapter_B)
            if not any(key):
                self._arrangement = None
            elif self._arrangement is None or self._arrangement.key != key:
                self._arrangement = Arrangement(key, [None if one is None else self._of(one) for one in adapter_B])
            self._arranged_B = adapter_B
        buffers.low_rank.arrangement = self._arrangement
        try:
            yield
        finally:
            buffers.low_rank.arrangement = None

    def _of(self, adapter: RowAdapter) -> dict[str, GroupLowRank]:
        """Return the matrices of an adapter, by group of layers."""
        found = self._matrices.get(adapter)
        if found is None:
            blocks = [(one.qkv, one.output, one.gate_up, one.down) for one in self._blocks]
            groups = [*chain.from_iterable(blocks), *([self._head] if isinstance(self._head, ProjectionGroup) else [])]
            matrices = {group.name: group.of(adapter) for group in groups}
            found = {name: one for name, one in matrices.items() if one is not None}
            self._matrices[adapter] = found
        return found

    def parts(
        self, token_B: NDArray[np.int32], position_B: NDArray[np.int32], layers: LayerCaches
    ) -> Generator[None, None, Floats]:
        """Compute the logits, (B, V), in a new array; yields when the adapters are known, and after every block.

        Other steps can be computed where this yields. `layers.attention` writes the keys and values of the tokens.
        """
        buffers, self._buffers = self._buffers_for(len(token_B)), None
        arrangement = buffers.low_rank.arrangement
        yield
        buffers.low_rank.arrangement = arrangement
        if arrangement is not None:
            token_B, position_B = arrangement.sorted(token_B), arrangement.sorted(position_B)
        np.take(self._embeddings().array.T, token_B, axis=0, out=buffers.x.array, mode="clip")
        angle_B_1_H = (position_B.astype(np.float32)[:, None] * self._frequency_H)[:, None]
        angles = np.cos(angle_B_1_H), np.sin(angle_B_1_H)
        for block, columns, prompts in zip(self._blocks, layers.columns, layers.prompts, strict=True):
            with np.errstate(all="ignore"):  # log-probabilities reveal values that are not finite
                self._attend(block, buffers, angles, layers.attention, columns, prompts)
                block.before_mlp(buffers.x.array, buffers.normed.array)
                block.gate_up(buffers.normed, (buffers.gate, buffers.up), buffers.low_rank)
                swiglu_in_place(buffers.gate.array, buffers.up.array, buffers.spare_B_F)
                block.down(buffers.gate, (buffers.x,), buffers.low_rank, add=True)
            yield
        with np.errstate(all="ignore"):
            self._norm(buffers.x.array, buffers.normed.array)
            logits_B_V = self._head_logits(buffers)
        buffers.low_rank.arrangement, self._buffers = None, buffers
        return logits_B_V

    def _head_logits(self, buffers: StepBuffers) -> Floats:
        """Compute the logits of `buffers.normed` in the order of the slots."""
        head, arrangement = self._head, buffers.low_rank.arrangement
        sorts_logits = arrangement is not None and arrangement.changes(head.name, by_policy=any(head.own()))
        if arrangement is not None and not sorts_logits:
            buffers.normed.array[:] = arrangement.by_slot(buffers.normed.array)
        logits = empty(len(buffers.x.array), head.outputs)
        head(buffers.normed, (logits,), buffers.low_rank)
        return arrangement.by_slot(logits.array) if arrangement is not None and sorts_logits else logits.array

    def _attend(
        self,
        block: DecoderBlock,
        buffers: StepBuffers,
        angles: tuple[Floats, Floats],
        attention: DecodeAttention,
        columns: tuple[Floats, Floats],
        prompts: dict[int, tuple[Floats, Floats]],
    ) -> None:
        """Add the attention output of a block to the residual stream."""
        B, (K, D), R, arrangement = len(buffers.x.array), self.key_shape, self._repeats, buffers.low_rank.arrangement
        block.before_attention(buffers.x.array, buffers.normed.array)
        block.qkv(buffers.normed, buffers.parts, buffers.low_rank)
        heads_B_N_D = buffers.heads.array.reshape(B, -1, D)
        rotated_B_N_D = heads_B_N_D[:, : block.heads + K]
        if block.head_norm is not None:
            rotated_B_N_D *= inverse_rms(rotated_B_N_D, block.eps)
            rotated_B_N_D *= block.head_norm()
        rotate(rotated_B_N_D, *angles)
        if arrangement is not None:
            heads_B_N_D = arrangement.by_slot(heads_B_N_D)
        queries_B_K_R_D = heads_B_N_D[:, : block.heads].reshape(B, K, R, D)
        attention.put_queries(queries_B_K_R_D, block.scale)
        keys, values = columns
        attention.write(keys, heads_B_N_D[:, block.heads : block.heads + K])
        attention.write(values, heads_B_N_D[:, block.heads + K :])
        sum_K_B_R_D, weight_K_B_R_1 = attention.attend(keys, values, prompts)
        attention.divide(sum_K_B_R_D, weight_K_B_R_1, buffers.attended.array.reshape(B, K, R, D))
        if arrangement is not None:
            buffers.attended.array[:] = arrangement.sorted(buffers.attended.array)
        block.output(buffers.attended, (buffers.x,), buffers.low_rank, add=True)

    def _buffers_for(self, rows: int) -> StepBuffers:
        """Return buffers for `rows` rows; those of the last step if it had the same number."""
        if self._buffers is None or len(self._buffers.x.array) != rows:
            block = self._blocks[0]
            width, inner = self._embeddings().array.shape[0], block.gate_up.outputs
            starts = np.cumsum([0, *(one.outputs for one in block.qkv.projections)]).tolist()
            heads = empty(rows, starts[-1])
            self._arrangement = None
            self._buffers = StepBuffers(
                x=empty(rows, width),
                normed=empty(rows, width),
                heads=heads,
                parts=[matrix(heads.array[:, start:stop]) for start, stop in pairwise(starts)],
                attended=empty(rows, block.heads * self.key_shape[1]),
                gate=empty(rows, inner),
                up=empty(rows, inner),
                low_rank=LowRankBuffers(rows),
                spare_B_F=np.empty((rows, inner), np.float32),
            )
        return self._buffers
