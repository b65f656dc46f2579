"""The draw in NumPy, for the CPU backend: there MLX's exponentials and sorts take ten to a hundred times as long.

Same algorithm and same uniforms as `sampling.draw`, its twin in the tests. Waiting for the logits costs nothing on
the CPU, where a launch returns when most of its work is done.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.cpu.host_filters import filter_on_host, supported_on_host
from clotho.inference.sampling import BLOCK, ONE_STAGE, Drawn, Supports
from clotho.inference.sampling_params import SamplingPlan


def can_draw_on_host(plan: SamplingPlan) -> bool:
    """Say whether the plan is within what `draw_on_host` knows, and the backend is the CPU.

    It knows all but repetition penalties, whose table of seen tokens is the device's, and alternatives.
    """
    return plan.penalty_B is None and not plan.top_logprobs and mx.default_device() == mx.Device(mx.cpu)


def draw_on_host(x_B_V: NDArray[np.float32], uniform_B_2: NDArray[np.float32] | None, plan: SamplingPlan) -> Drawn:
    """Draw a token per row and report its log-probability, as `sampling.draw` does; uses up the logits."""
    _adjust(x_B_V, plan)
    x_B_V -= x_B_V.max(axis=-1, keepdims=True)
    weight_B_V = np.exp(x_B_V)
    if uniform_B_2 is None:
        token_B, total_B = x_B_V.argmax(axis=-1), weight_B_V.sum(axis=-1)
    else:
        token_B, total_B = _choose(weight_B_V, uniform_B_2)
        if plan.greedy_B is not None:
            token_B = np.where(np.array(plan.greedy_B), x_B_V.argmax(axis=-1), token_B)
    logp_B = x_B_V[np.arange(len(token_B)), token_B] - np.log(total_B)
    drawn = Drawn(mx.array(token_B.astype(np.int32)), mx.array(logp_B.astype(np.float32)))
    if plan.recording is None:
        return drawn
    x_R_V = x_B_V[np.array(plan.recording.row_R)]
    token_R_K = mx.array(supported_on_host(x_R_V, plan.recording.width))
    return drawn._replace(supports=Supports(plan.recording.row_R, token_R_K))


def _adjust(x_B_V: NDArray[np.float32], plan: SamplingPlan) -> None:
    """Turn logits into those after bias, temperature and filters."""
    if plan.bias is not None:
        at_B_1 = np.arange(len(x_B_V))[:, None]
        np.add.at(x_B_V, (at_B_1, np.array(plan.bias.token_B_K)), np.array(plan.bias.value_B_K))
    if plan.inverse_temperature_B is not None:
        x_B_V *= np.array(plan.inverse_temperature_B)[:, None]
    if plan.filters is not None:
        filter_on_host(x_B_V, plan.filters)


def _choose(
    weight_B_V: NDArray[np.float32], uniform_B_2: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    vocabulary = weight_B_V.shape[1]
    if vocabulary <= ONE_STAGE:
        return _invert(weight_B_V, uniform_B_2[:, :1])
    starts_N = np.arange(0, vocabulary, BLOCK)
    block_B, total_B = _invert(np.add.reduceat(weight_B_V, starts_N, axis=-1), uniform_B_2[:, :1])
    inside_B_K = block_B[:, None] * BLOCK + np.arange(BLOCK)
    exists_B_K = inside_B_K < vocabulary
    weight_B_K = np.take_along_axis(weight_B_V, np.where(exists_B_K, inside_B_K, 0), axis=-1) * exists_B_K
    return block_B * BLOCK + _invert(weight_B_K, uniform_B_2[:, 1:])[0], total_B


def _invert(
    weight_B_N: NDArray[np.float32], uniform_B_1: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    prefix_B_N = np.cumsum(weight_B_N, axis=-1)
    total_B_1 = prefix_B_N[:, -1:]
    hit_B_N = (prefix_B_N > uniform_B_1 * total_B_1) & (weight_B_N > 0)
    index_B = np.where(hit_B_N.any(axis=-1), hit_B_N.argmax(axis=-1), weight_B_N.argmax(axis=-1))
    return index_B, total_B_1[:, 0]
