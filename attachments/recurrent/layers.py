"""The recurrent layers of mlx-lm, computed in chunks that the backward pass computes again."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta, ssm

from attachments.recurrent.delta_rule import CHUNK, SEGMENT, delta_rule, recomputed_scan, state_space_chunk
from clotho.models.attention import ResetState, model_modules

SHORTEST = 16
"""Number of tokens from which chunks are faster than a loop over tokens; a decode step has fewer."""

NO_STATE = -1e3
"""Logarithm of a decay that leaves nothing of a state: its exponential is 0 in float32."""

loop = gated_delta.gated_delta_update
"""The function of mlx-lm, a loop over tokens or a kernel of Metal without gradients."""

whole = ssm.ssm_update
"""The function of mlx-lm, whose chunks of 256 tokens are all kept for the backward pass."""


def install() -> None:
    """Replace mlx-lm's functions in all of its model modules that are loaded, for good, because threads share them."""
    for module in map(vars, model_modules()):
        for function, own in ((loop, gated_delta_update), (whole, ssm_update)):
            if module.get(own.__name__) is function:
                module[own.__name__] = own


CONVOLVED = 13
"""Number of arrays of the size of its output that the backward pass of a convolution of 4 tokens works with."""


def scan_bytes(block: nn.Module, state: Sequence[int], *, rows: int, tokens: int) -> int:
    """Return the peak bytes of the backward pass of a block's recurrent layer, beside its inputs and their gradients.

    state: (H, V, K), or (H, size, state size) of a state-space layer. The chunks are computed first, then the
    convolutions. The terms were fitted to peaks of single layers on the CPU, for V and K from 16 to 128.
    """
    H, V, K = state
    layers = [layer for layer in block.modules() if "A_log" in layer]
    if not layers:
        return 0
    widths = [one.weight.shape[0] for layer in layers for one in layer.modules() if isinstance(one, nn.Conv1d)]
    if any("ssm_update" in vars(sys.modules[type(layer).__module__]) for layer in layers):
        at_once, floats, kept = CHUNK, 15 * CHUNK, 3 * V + V * K // CHUNK
    else:
        at_once, kept = max(2, SEGMENT // rows) * CHUNK, 0
        per_channel = any(layer.dt_bias.size > H for layer in layers)
        floats = 7 * CHUNK + 43 * K + 2 * V if per_channel else 14 * CHUNK + 14 * K + 6 * V
    chunks = H * (min(tokens, at_once) * floats + tokens * kept)
    return rows * max(chunks, tokens * CONVOLVED * max(widths)) * mx.float32.size


def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | ResetState | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute the outputs (rows, S, heads, size) of a state-space layer, and its last state. Arguments are mlx-lm's.

    `ResetState` in place of a state sets it to 0 at each token that the mask excludes. Short passes are left to mlx-lm,
    except those with a mask alone, after which its state is not that of the tokens of the mask.
    """
    rows, S, heads, size = hidden_states.shape
    stops = mask is None or lengths is not None
    if S < SHORTEST and stops and not isinstance(state, ResetState):
        own: tuple[mx.array, mx.array] = whole(
            hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask=mask, lengths=lengths
        )
        return own
    dt_R_S_H = mx.clip(nn.softplus(dt.astype(mx.float32) + dt_bias), *time_step_limit)
    log_decay_R_S_H = -mx.exp(A_log.astype(mx.float32)) * dt_R_S_H
    if lengths is not None:
        within_R_S = mx.arange(S) < lengths[:, None]
        mask = within_R_S if mask is None else mask & within_R_S
    if mask is not None:
        dt_R_S_H = mx.where(mask[..., None], dt_R_S_H, 0.0)
        log_decay_R_S_H = mx.where(mask[..., None], log_decay_R_S_H, _masked(state))
    if not isinstance(state, mx.array):
        state = mx.zeros((rows, heads, size, B.shape[-1]), dtype=mx.float32)
    output, (last,) = recomputed_scan(
        state_space_chunk, (hidden_states, B, C, dt_R_S_H, log_decay_R_S_H), (state,), axis=1, size=CHUNK
    )
    return output + hidden_states * D[:, None], last


def _masked(state: mx.array | ResetState | None) -> float:
    """Return the logarithm of the decay of a state at tokens that the mask excludes."""
    return NO_STATE if isinstance(state, ResetState) else 0.0


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | ResetState | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Compute the outputs (B, S, H, V) of the gated delta rule, and its last state. Names and arguments are mlx-lm's.

    `ResetState` in place of a state sets it to 0 at each token that the mask excludes.
    Short passes, and on Metal passes without gradients, which have a kernel, are left to mlx-lm.
    """
    has_kernel = use_kernel and mx.default_device() == mx.gpu and mx.metal.is_available() and k.shape[-1] % 32 == 0
    if not isinstance(state, ResetState) and (q.shape[1] < SHORTEST or has_kernel):
        own: tuple[mx.array, mx.array] = loop(
            q, k, v, a, b, A_log, dt_bias, state, mask,
            use_kernel=use_kernel, lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval,
        )  # fmt: skip
        return own
    rate = mx.exp(A_log.astype(mx.float32))
    if lower_bound is None:
        log_decay = -rate * nn.softplus(a + dt_bias)
    else:
        log_decay = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
    masked = _masked(state)
    if not isinstance(state, mx.array):
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]), dtype=mx.float32)
    beta = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
    return delta_rule(q, k, v, log_decay, beta, state, mask, masked=masked)
