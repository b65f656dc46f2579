"""The layers of transformer blocks in NumPy: attention, gated linear layers and mixtures, for one token of every row.

Each adds its output to the residual stream. Rows are in the order of computation; caches are in the order of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from mlx_lm.tuner.lora import LoRASwitchLinear
from numpy.typing import NDArray

from attachments.cpu.adapter_segments import ExpertLowRank
from attachments.cpu.attention import DecodeAttention
from attachments.cpu.blas import Floats, Matrix, part
from attachments.cpu.decoder_layers import (
    LowRankBuffers,
    ParameterVector,
    ProjectionGroup,
    as_numpy,
    empty,
    inverse_rms,
    projections,
    rotate,
    sigmoid,
    swiglu_in_place,
)
from clotho.inference.rows import RowAdapter


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


class ExpertLayer:
    """The linear layer of every expert, y = x W, plus scale (x A) B if it has an adapter."""

    def __init__(self, layer: Any, name: str) -> None:
        """layer: a `SwitchLinear` without biases, or a `LoRASwitchLinear` over one. name: its name in the model."""
        self.name, self._layer = name, layer
        self._is_adapted = isinstance(layer, LoRASwitchLinear)

    def weights(self) -> Floats:
        """Return W of every expert, (experts, outputs, inputs)."""
        return as_numpy((self._layer.linear if self._is_adapted else self._layer).weight)

    def own(self) -> ExpertLowRank | None:
        """Return the matrices of the policy's adapter."""
        layer = self._layer
        if not self._is_adapted:
            return None
        return ExpertLowRank(as_numpy(layer.lora_a), as_numpy(layer.lora_b), float(layer.scale))

    def of(self, adapter: RowAdapter) -> ExpertLowRank | None:
        """Return the matrices of an adapter; None if it does not change the layer."""
        if self.name not in adapter.scales:
            return None
        a, b = (as_numpy(adapter.arrays[f"{self.name}.{part}"]) for part in ("lora_a", "lora_b"))
        return ExpertLowRank(a, b, adapter.scales[self.name])


class Experts:
    """Gated linear layers, of which each token has the chosen ones, weighted by the probabilities of the router.

    Beside them, all tokens can have an expert that they share (Qwen3.5). per_token: number of chosen ones.
    """

    def __init__(self, mlp: Any, name: str) -> None:
        self._router = projections(mlp, name, "gate")
        self.per_token, self._is_normalised = int(mlp.top_k), bool(mlp.norm_topk_prob)
        experts = f"{name}.switch_mlp"
        self._layers = [
            ExpertLayer(mlp.switch_mlp[key], f"{experts}.{key}") for key in ("gate_proj", "up_proj", "down_proj")
        ]
        self.groups = [self._router, *self._layers]
        self._shared: GatedLinear | None = None
        if "shared_expert" in mlp:
            share = projections(mlp, name, "shared_expert_gate")
            self._shared = GatedLinear(mlp.shared_expert, f"{name}.shared_expert", share)
            self.groups += self._shared.groups

    def __call__(self, buffers: StepBuffers) -> None:
        """Add the output for `buffers.normed` to the residual stream, and keep the choices as `buffers.expert_B_C`."""
        (router,) = buffers.matrices("router", 1, self._router.outputs)
        self._router(buffers.normed, (router,), buffers.low_rank)
        share_B_E = np.exp(router.array - router.array.max(axis=-1, keepdims=True))
        share_B_E /= share_B_E.sum(axis=-1, keepdims=True)
        expert_B_C = np.argpartition(share_B_E, -self.per_token, axis=-1)[:, -self.per_token :]
        buffers.expert_B_C = expert_B_C
        share_B_C = np.take_along_axis(share_B_E, expert_B_C, axis=-1)
        if self._is_normalised:
            share_B_C /= share_B_C.sum(axis=-1, keepdims=True)
        arrangement = buffers.low_rank.arrangement
        segments = [(slice(None), None)] if arrangement is None else [one[:2] for one in arrangement.segments]
        for rows, groups in segments:
            low_ranks = [one.own() if groups is None else groups.get(one.name) for one in self._layers]
            x, out = buffers.normed.array[rows], buffers.x.array[rows]
            self._add(x, out, expert_B_C[rows], share_B_C[rows], low_ranks)
        if self._shared is not None:
            self._shared(buffers)

    def _add(
        self,
        x_B_W: Floats,
        out_B_W: Floats,
        expert_B_C: NDArray[np.int64],
        share_B_C: Floats,
        low_ranks: Sequence[Any],
    ) -> None:
        """Add the outputs of the C experts of every row to `out`, one expert after another."""
        weights, order_N = [layer.weights() for layer in self._layers], np.argsort(expert_B_C, axis=None, kind="stable")
        row_N, expert_N = order_N // self.per_token, expert_B_C.ravel()[order_N]
        starts = [0, *(np.flatnonzero(np.diff(expert_N)) + 1).tolist(), len(expert_N)]
        for first, stop in pairwise(starts):
            expert, rows = int(expert_N[first]), row_N[first:stop]
            (gate, up, down), (of_gate, of_up, of_down) = weights, low_ranks
            x = x_B_W[rows]
            hidden, other = _product(x, gate, of_gate, expert), _product(x, up, of_up, expert)
            swiglu_in_place(hidden, other, np.empty_like(hidden))
            hidden *= share_B_C.ravel()[order_N[first:stop], None]
            out_B_W[rows] += _product(hidden, down, of_down, expert)


def _product(x: Floats, weights_E_O_I: Floats, low_rank: ExpertLowRank | None, expert: int) -> Floats:
    """Return the outputs of one expert, with its adapter."""
    y: Floats = x @ weights_E_O_I[expert].T
    if low_rank is not None:
        y += (x @ low_rank.a_E_R_I[expert].T) @ (np.float32(low_rank.scale) * low_rank.b_E_O_R[expert].T)
    return y
