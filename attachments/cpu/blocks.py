"""The layers of transformer blocks in NumPy: attention and gated linear layers, for one token of every row.

Each adds its output to the residual stream. Rows are in the order of computation; caches are in the order of the slots.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from attachments.cpu.attention import DecodeAttention
from attachments.cpu.blas import Floats, Matrix, part
from attachments.cpu.decoder_layers import (
    LowRankBuffers,
    ParameterVector,
    ProjectionGroup,
    empty,
    inverse_rms,
    projections,
    rotate,
    sigmoid,
    swiglu_in_place,
)


class StepBuffers:
    """Matrices of a decode step of B rows, reused by all blocks. x: the residual stream.

    expert_B_C: the experts that the last mixture chose.
    """

    expert_B_C: NDArray[np.int64]

    def __init__(self, rows: int, width: int) -> None:
        self.rows = rows
        self.x, self.normed, self.low_rank = empty(rows, width), empty(rows, width), LowRankBuffers(rows)
        self._matrices: dict[tuple[str, int, int], list[Matrix]] = {}
        self._columns: dict[tuple[int, ...], tuple[Matrix, list[Matrix]]] = {}

    def matrices(self, name: str, number: int, width: int) -> list[Matrix]:
        """Return matrices of this width, which layers share by their name."""
        found = self._matrices.get((name, number, width))
        if found is None:
            found = self._matrices[name, number, width] = [empty(self.rows, width) for _ in range(number)]
        return found

    def columns(self, widths: tuple[int, ...]) -> tuple[Matrix, list[Matrix]]:
        """Return a matrix for outputs of these widths, and its parts. Layers share it."""
        found = self._columns.get(widths)
        if found is None:
            edges, rows = [0, *accumulate(widths)], slice(0, self.rows)
            whole = empty(self.rows, edges[-1])
            found = self._columns[widths] = whole, [part(whole, rows, slice(*one)) for one in pairwise(edges)]
        return found


class HostStep(NamedTuple):
    """A decode step. angles: cosines and sines of the positions, for `rotate`."""

    buffers: StepBuffers
    attention: DecodeAttention
    angles: tuple[Floats, Floats]


class AttentionCache(NamedTuple):
    """KV cache of a layer: visible columns, the last one not yet written, and shared prompts by key."""

    keys_K_B_C_D: Floats
    values_K_B_C_D: Floats
    prompts: dict[int, tuple[Floats, Floats]]


class Mixer(Protocol):
    """A layer in which the tokens of a row affect each other."""

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays of fixed size that it keeps of a row; none for attention."""
        ...

    @property
    def groups(self) -> tuple[ProjectionGroup, ...]:
        """Layers that can have an adapter."""
        ...

    def __call__(self, step: HostStep, cache: Any) -> None:
        """Add the output for `step.buffers.normed` to the residual stream, and update the cache."""
        ...


class Attention:
    """Attention with rotary positions; on request with norms of queries and keys, and with a gate per channel.

    Qwen3.5 multiplies the result by sigmoid(gate); the gates of a head follow its queries.
    """

    state_shapes: tuple[tuple[int, ...], ...] = ()

    def __init__(self, attention: Any, name: str) -> None:
        self._heads = attention.n_heads if "n_heads" in vars(attention) else attention.num_attention_heads
        self.key_heads = attention.n_kv_heads if "n_kv_heads" in vars(attention) else attention.num_key_value_heads
        self._qkv = projections(attention, name, "q_proj", "k_proj", "v_proj")
        self._output = projections(attention, name, "o_proj")
        self.groups = self._qkv, self._output
        queries, keys, _ = self._widths = tuple(one.outputs for one in self._qkv.projections)
        self.size = keys // self.key_heads
        self.repeats = self._heads // self.key_heads
        self._is_gated = queries == 2 * self._heads * self.size
        self._scale = np.float32(attention.scale)
        self._head_norm: ParameterVector | None = None
        if "q_norm" in attention:
            parts = ((attention.q_norm, "weight", self._heads), (attention.k_norm, "weight", self.key_heads))
            self._head_norm, self._eps = ParameterVector(*parts), float(attention.q_norm.eps)

    def __call__(self, step: HostStep, cache: AttentionCache) -> None:
        """Add the output to the residual stream, and write keys and values into the cache."""
        buffers, arrangement = step.buffers, step.buffers.low_rank.arrangement
        B, H, K, D = buffers.rows, self._heads, self.key_heads, self.size
        whole, parts = buffers.columns(self._widths)
        self._qkv(buffers.normed, parts, buffers.low_rank)
        heads_B_N_D, gate_B_H_D = whole.array.reshape(B, -1, D), None
        if self._is_gated:
            gate_B_H_D = heads_B_N_D[:, 1 : 2 * H : 2]
            heads_B_N_D = np.concatenate([heads_B_N_D[:, : 2 * H : 2], heads_B_N_D[:, 2 * H :]], axis=1)
        rotated_B_N_D = heads_B_N_D[:, : H + K]
        if self._head_norm is not None:
            rotated_B_N_D *= inverse_rms(rotated_B_N_D, self._eps)
            rotated_B_N_D *= self._head_norm()
        rotate(rotated_B_N_D, *step.angles)
        if arrangement is not None:
            heads_B_N_D = arrangement.by_slot(heads_B_N_D)
        queries_B_K_R_D = heads_B_N_D[:, :H].reshape(B, K, -1, D)
        step.attention.put_queries(queries_B_K_R_D, self._scale)
        step.attention.write(cache.keys_K_B_C_D, heads_B_N_D[:, H : H + K])
        step.attention.write(cache.values_K_B_C_D, heads_B_N_D[:, H + K :])
        sum_K_B_R_D, weight_K_B_R_1 = step.attention.attend(*cache)
        (mixed,) = buffers.matrices("mixed", 1, H * D)
        step.attention.divide(sum_K_B_R_D, weight_K_B_R_1, mixed.array.reshape(B, K, -1, D))
        if arrangement is not None:
            mixed.array[:] = arrangement.sorted(mixed.array)
        if gate_B_H_D is not None:
            mixed_B_H_D = mixed.array.reshape(B, H, D)
            mixed_B_H_D *= sigmoid(gate_B_H_D)
        self._output(mixed, (buffers.x,), buffers.low_rank, add=True)


class GatedLinear:
    """down(silu(gate(x)) * up(x)), if there is a `share` multiplied by sigmoid(share(x)), a number per token."""

    def __init__(self, mlp: Any, name: str, share: ProjectionGroup | None = None) -> None:
        self._gate_up = projections(mlp, name, "gate_proj", "up_proj")
        self._down, self._share = projections(mlp, name, "down_proj"), share
        self.groups = self._gate_up, self._down, *([share] if share else [])

    def __call__(self, buffers: StepBuffers) -> None:
        """Add the output for `buffers.normed` to the residual stream."""
        gate, up, spare = buffers.matrices("gated", 3, self._gate_up.outputs)
        self._gate_up(buffers.normed, (gate, up), buffers.low_rank)
        swiglu_in_place(gate.array, up.array, spare.array)
        if self._share is not None:
            (share,) = buffers.matrices("share", 1, 1)
            self._share(buffers.normed, (share,), buffers.low_rank)
            gate.array[:] *= sigmoid(share.array)
        self._down(gate, (buffers.x,), buffers.low_rank, add=True)
