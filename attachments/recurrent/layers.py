"""The recurrent layers of mlx-lm, computed in chunks where it computes token by token."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta

from attachments.recurrent.delta_rule import delta_rule
from clotho.models.attention import model_modules

SHORTEST = 16
"""Number of tokens from which chunks are faster than a loop over tokens; a decode step has fewer."""

loop = gated_delta.gated_delta_update
"""The function of mlx-lm, a loop over tokens or a kernel of Metal without gradients."""


def install() -> None:
    """Replace mlx-lm's function in all of its model modules that are loaded, for good, because threads share them."""
    for module in model_modules():
        if vars(module).get("gated_delta_update") is loop:
            vars(module)["gated_delta_update"] = gated_delta_update


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Compute the outputs (B, S, H, V) of the gated delta rule, and its last state. Names and arguments are mlx-lm's.

    Short passes, and on Metal passes without gradients, which have a kernel, are left to mlx-lm.
    """
    has_kernel = use_kernel and mx.default_device() == mx.gpu and mx.metal.is_available() and k.shape[-1] % 32 == 0
    if q.shape[1] < SHORTEST or has_kernel:
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
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]), dtype=mx.float32)
    return delta_rule(q, k, v, log_decay, mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0), state, mask)
