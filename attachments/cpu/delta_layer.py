"""Layers with the gated delta rule in NumPy, whose state of a row has a fixed size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attachments.cpu.blas import Floats
from attachments.cpu.blocks import HostStep
from attachments.cpu.decoder_layers import ParameterVector, allocated, as_numpy, inverse_rms, projections, sigmoid

BY_KIND = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""The input layers of Qwen3.5: queries, keys, values, gates, beta and rates, each of all heads."""

BY_HEAD = ("in_proj_qkvz", "in_proj_ba")
"""Those of Qwen3-Next, whose outputs are in the same order for one head of keys after another."""

EPS = 1e-6
"""Added to the sum of the squares of a query or a key."""


class RowState(NamedTuple):
    """State of the rows in a layer. recent: the last inputs of its convolution, N of C channels."""

    recent_B_N_C: Floats
    state_B_H_V_K: Floats


class RowStates:
    """States of the rows in all layers with the gated delta rule. shapes: of the arrays of a row, by layer."""

    def __init__(self, shapes: Sequence[Iterable[tuple[int, ...]]], rows: int) -> None:
        self.layers = [RowState(*(allocated((rows, *shape)) for shape in layer)) for layer in shapes]

    def put(self, slots: Sequence[int], state: Iterable[Iterable[mx.array]]) -> None:
        """Write the state of one row, as prefill returns it, into slots."""
        for layer, arrays in zip(self.layers, state, strict=True):
            for held, array in zip(layer, arrays, strict=True):
                held[list(slots)] = as_numpy(array)

    def clear(self, slots: Sequence[int]) -> None:
        """Write the state of a row without tokens into slots."""
        for held in chain.from_iterable(self.layers):
            held[list(slots)] = 0.0

    def of(self, slot: int) -> list[tuple[mx.array, ...]]:
        """Return a copy of the state of a row, by layer."""
        return [tuple(mx.array(held[slot : slot + 1]) for held in layer) for layer in self.layers]

    def take(self, slots: Sequence[int], rows: int) -> None:
        """Keep only these slots, in this order, followed by empty ones up to `rows`."""
        self.layers = [RowState(*(_taken(held, slots, rows) for held in layer)) for layer in self.layers]


def _taken(held: Floats, slots: Sequence[int], rows: int) -> Floats:
    taken = allocated((rows, *held.shape[1:]))
    taken[: len(slots)] = held[list(slots)]
    return taken


class DeltaLayer:
    """The gated delta rule after a causal convolution per channel, and before a gated norm (Qwen3.5, Qwen3-Next).

    Per head, a state S of (V, K) numbers is updated at every token (arXiv:2412.06464):

        S_t = exp(g_t) S_(t-1) + d_t k_t^T,  d_t = beta_t (v_t - exp(g_t) S_(t-1) k_t),  y_t = S_t q_t
    """

    def __init__(self, layer: Any, name: str) -> None:
        self._layer = layer
        by_head = BY_HEAD[0] in layer
        self._inputs = projections(layer, name, *(BY_HEAD if by_head else BY_KIND))
        self._output = projections(layer, name, "out_proj")
        self.groups = self._inputs, self._output
        self._widths = tuple(one.outputs for one in self._inputs.projections)
        self._key_heads, self._heads = layer.num_k_heads, layer.num_v_heads
        self._key_size, self._value_size = layer.head_k_dim, layer.head_v_dim
        self._norm, self._eps = ParameterVector((layer.norm, "weight", 1)), float(layer.norm.eps)
        self._order_X = self._order_by_kind() if by_head else None
        recent = (layer.conv_kernel_size - 1, layer.conv_dim)
        self.state_shapes: tuple[tuple[int, ...], ...] = recent, (self._heads, self._value_size, self._key_size)

    def __call__(self, step: HostStep, cache: RowState) -> None:
        """Add the output to the residual stream, and update the states with the T tokens of every row."""
        buffers, arrangement, layer = step.buffers, step.buffers.low_rank.arrangement, self._layer
        whole, parts = buffers.columns(self._widths)
        self._inputs(buffers.normed, parts, buffers.low_rank)
        projected = whole.array if arrangement is None else arrangement.by_slot(whole.array)
        if self._order_X is not None:
            projected = projected[:, self._order_X]
        B, H, V = len(cache.state_B_H_V_K), self._heads, self._value_size
        C = layer.conv_dim
        projected_B_T_X = projected.reshape(B, buffers.rows // B, -1)
        beta_B_T_H = sigmoid(projected_B_T_X[..., -2 * H : -H])
        step_B_T_H = np.logaddexp(np.float32(0.0), projected_B_T_X[..., -H:] + as_numpy(layer.dt_bias))
        decay_B_T_H = np.exp(-np.exp(as_numpy(layer.A_log)) * step_B_T_H)
        convolved_B_T_C = self._convolved(projected_B_T_X[..., :C], cache.recent_B_N_C)
        y_B_T_H_V = self._scanned(convolved_B_T_C, decay_B_T_H, beta_B_T_H, cache.state_B_H_V_K)
        y_B_T_H_V *= inverse_rms(y_B_T_H_V, self._eps) * self._norm()
        gate_B_T_X = projected_B_T_X[..., C : C + H * V]
        (mixed,) = buffers.matrices("mixed", 1, H * V)
        np.multiply(gate_B_T_X, sigmoid(gate_B_T_X), out=mixed.array.reshape(gate_B_T_X.shape))
        mixed.array[:] *= y_B_T_H_V.reshape(mixed.array.shape)
        if arrangement is not None:
            mixed.array[:] = arrangement.sorted(mixed.array)
        self._output(mixed, (buffers.x,), buffers.low_rank, add=True)

    def _order_by_kind(self) -> NDArray[np.intp]:
        """Return the columns of `BY_HEAD` in the order of `BY_KIND`."""
        G, K, X = self._key_heads, self._key_size, self._heads // self._key_heads * self._value_size
        of_states, of_rates = np.split(np.arange(sum(self._widths)), [-2 * self._heads])
        parts = np.split(of_states.reshape(G, -1), np.cumsum([K, K, X]), axis=1)
        parts += np.split(of_rates.reshape(G, -1), 2, axis=1)
        return np.concatenate([part.ravel() for part in parts])

    def _convolved(self, x_B_T_C: Floats, recent_B_N_C: Floats) -> Floats:
        """Return silu of the convolution of the recent inputs and x, and keep the last inputs."""
        T, kernel_C_N = x_B_T_C.shape[1], as_numpy(self._layer.conv1d.weight)[..., 0]
        inputs_B_S_C = np.concatenate([recent_B_N_C, x_B_T_C], axis=1)
        recent_B_N_C[:] = inputs_B_S_C[:, T:]
        result_B_T_C = inputs_B_S_C[:, :T] * kernel_C_N[:, 0]
        for n in range(1, kernel_C_N.shape[1]):
            result_B_T_C += inputs_B_S_C[:, n : n + T] * kernel_C_N[:, n]
        result_B_T_C *= sigmoid(result_B_T_C)
        return result_B_T_C

    def _scanned(self, mixed_B_T_C: Floats, decay_B_T_H: Floats, beta_B_T_H: Floats, state_B_H_V_K: Floats) -> Floats:
        """Return y, (B, T, H, V), and update the state. G heads of keys serve R heads of values each.

        One product reads the decayed state for the key and for the query: y = S_(t-1) q + d (k^T q).
        """
        (B, T, H), G, K = beta_B_T_H.shape, self._key_heads, self._key_size
        pair_B_T_2_G_K = mixed_B_T_C[..., : 2 * G * K].reshape(B, T, 2, G, K)  # query and key
        squares_B_T_2_G_1 = np.vecdot(pair_B_T_2_G_K, pair_B_T_2_G_K)[..., None]
        pair_B_T_2_G_K = pair_B_T_2_G_K / np.sqrt(squares_B_T_2_G_1 + np.float32(EPS))
        pair_B_T_2_G_K[:, :, 0] *= np.float32(K**-0.5)
        overlap_B_T_G_1 = np.vecdot(pair_B_T_2_G_K[:, :, 0], pair_B_T_2_G_K[:, :, 1])[..., None]
        values_B_T_G_X = mixed_B_T_C[..., 2 * G * K :].reshape(B, T, G, -1)
        beta_B_T_G_X = np.repeat(beta_B_T_H, self._value_size, axis=-1).reshape(values_B_T_G_X.shape)
        y_B_T_G_X, state_B_G_X_K = np.empty(values_B_T_G_X.shape, np.float32), state_B_H_V_K.reshape(B, G, -1, K)
        change_B_G_X_K = np.empty_like(state_B_G_X_K)
        for t in range(T):
            state_B_H_V_K *= decay_B_T_H[:, t, :, None, None]
            read_B_G_2_X = pair_B_T_2_G_K[:, t].swapaxes(1, 2) @ state_B_G_X_K.swapaxes(2, 3)
            d_B_G_X = (values_B_T_G_X[:, t] - read_B_G_2_X[:, :, 1]) * beta_B_T_G_X[:, t]
            np.multiply(d_B_G_X[..., None], pair_B_T_2_G_K[:, t, 1, :, None], out=change_B_G_X_K)
            state_B_G_X_K += change_B_G_X_K
            y_B_T_G_X[:, t] = read_B_G_2_X[:, :, 0] + d_B_G_X * overlap_B_T_G_1[:, t]
        return y_B_T_G_X.reshape(B, T, H, -1)
