"""Mixtures of experts in NumPy: every token is computed by the experts that its router chooses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from mlx_lm.tuner.lora import LoRASwitchLinear
from numpy.typing import NDArray

from attachments.cpu.adapter_segments import ExpertLowRank
from attachments.cpu.blas import Floats
from attachments.cpu.blocks import GatedLinear, StepBuffers
from attachments.cpu.decoder_layers import as_numpy, projections, swiglu_in_place
from clotho.inference.rows import RowAdapter


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
