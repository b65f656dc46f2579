"""The gated delta rule in chunks equals mlx-lm's loop over tokens, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops
from numpy.typing import NDArray

from attachments.recurrent import delta_rule as module
from attachments.recurrent.delta_rule import delta_rule

Float64 = NDArray[np.float64]
Rule = Callable[..., tuple[mx.array, mx.array]]
DECAYS: dict[str, Callable[[mx.array], mx.array]] = {
    "usual": lambda u: -u,
    "near 1": lambda u: -1e-4 * u,
    "near 0": lambda u: -100.0 * u,
    "from 1 to 0": lambda u: -mx.exp(12.0 * u - 8.0),
}


def inputs(seed: int, S: int, *, channels: bool, decay: str, repeated: bool = False) -> list[mx.array]:
    """Return queries, keys, values, logarithms of decays, beta and a state: 2 heads of keys, 4 of values, 2 rows."""
    mx.random.seed(seed)
    B, G, H, K, V = 2, 2, 4, 6, 3
    queries, keys = (mx.random.normal((B, S, G, K)) for _ in range(2))
    keys = mx.broadcast_to(keys[:, :1], keys.shape) if repeated else keys
    keys /= mx.linalg.norm(keys, axis=-1, keepdims=True)
    log_decay = DECAYS[decay](mx.random.uniform(shape=(B, S, H, K) if channels else (B, S, H)))
    beta = mx.sigmoid(3.0 * mx.random.normal((B, S, H)))
    return [queries, keys, mx.random.normal((B, S, H, V)), log_decay, beta, mx.random.normal((B, H, V, K))]


def loop(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Compute with mlx-lm's loop."""
    found: Any = gated_delta_ops(queries, keys, values, mx.exp(log_decay), beta, state, mask)
    return found[0], found[1]


def results(rule: Rule, arrays: list[mx.array], mask: mx.array | None = None) -> list[mx.array]:
    """Return outputs, the last state, and the gradients of a weighted sum of both."""
    weights = [mx.random.normal(arrays[index].shape, key=mx.random.key(index)) for index in (2, 5)]

    def loss(*arrays: mx.array) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        output, state = rule(*arrays, mask)
        output = output if mask is None else mx.where(mask[..., None, None], output, 0.0)
        return mx.sum(output * weights[0]) + mx.sum(state * weights[1]), (output, state)

    (_, (output, state)), gradients = mx.value_and_grad(loss, argnums=tuple(range(6)))(*arrays)
    return [output, state, *gradients]


def differences(arrays: list[mx.array], mask: mx.array | None = None) -> list[float]:
    """Return the largest difference of each result from that of the loop, relative to its largest number."""
    pairs = zip(results(delta_rule, arrays, mask), results(loop, arrays, mask), strict=True)
    return [float(np.array(mx.max(mx.abs(one - other)) / mx.max(mx.abs(other)))) for one, other in pairs]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 tokens, of which 2 are computed again together."""
    monkeypatch.setattr(module, "CHUNK", 8)
    monkeypatch.setattr(module, "SEGMENT", 2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(20))
def test_chunks_equal_the_loop(seed: int) -> None:
    """Values and gradients are equal within 1e-5: any length, state and mask, decays near 0 and near 1, equal keys."""
    decay, S = list(DECAYS)[seed % 4], 15 + seed
    arrays = inputs(seed, S, channels=seed // 2 % 2 == 0, decay=decay, repeated=seed % 3 == 2)
    mask = mx.random.uniform(shape=(2, S)) < 0.8 if seed % 2 else None
    assert max(differences(arrays, mask)) < 1e-5


@pytest.mark.parametrize("channels", [False, True])
def test_chunks_of_the_usual_size_equal_the_loop(channels: bool) -> None:
    """More than one chunk of 64 tokens; equal keys without decay would overflow in sums of powers."""
    assert max(differences(inputs(1, 97, channels=channels, decay="near 1", repeated=True))) < 1e-5


def tokens_in_float64(
    queries: Float64, keys: Float64, values: Float64, log_decay: Float64, beta: Float64, state: Float64
) -> Float64:
    """Compute the outputs of the equation of the module, token by token and head by head; log_decay: per channel."""
    B, S, H, _ = values.shape
    output = np.zeros_like(values)
    for b, h in np.ndindex(B, H):
        g, state_K_V = h * queries.shape[2] // H, state[b, h].T
        for t in range(S):
            k = keys[b, t, g]
            state_K_V = np.exp(log_decay[b, t, h])[:, None] * state_K_V
            state_K_V = state_K_V + np.outer(k, beta[b, t, h] * (values[b, t, h] - state_K_V.T @ k))
            output[b, t, h] = state_K_V.T @ queries[b, t, g]
    return output


@pytest.mark.usefixtures("small")
def test_gradients_equal_finite_differences_in_float64() -> None:
    """Of an independent implementation, along one direction in all arguments, over three chunks."""
    arrays = inputs(0, 19, channels=True, decay="usual")
    directions = [mx.random.normal(array.shape, key=mx.random.key(9)) for array in arrays]

    def along(step: mx.array) -> mx.array:
        output, _ = delta_rule(*(a + step * d for a, d in zip(arrays, directions, strict=True)))
        return mx.sum(mx.sin(output))

    exact = [np.array(array, dtype=np.float64) for array in (*arrays, *directions)]

    def along_in_float64(step: float) -> float:
        output = tokens_in_float64(*(a + step * d for a, d in zip(exact[:6], exact[6:], strict=True)))
        return float(np.sin(output).sum())

    value, gradient = mx.value_and_grad(along)(mx.array(0.0))
    assert value.item() == pytest.approx(along_in_float64(0.0), abs=1e-4)
    expected = (along_in_float64(1e-6) - along_in_float64(-1e-6)) / 2e-6
    assert gradient.item() == pytest.approx(expected, rel=1e-4)


def test_outputs_have_the_type_of_the_queries() -> None:
    """The state is float32, as in mlx-lm."""
    arrays = [array.astype(mx.bfloat16) for array in inputs(0, 20, channels=False, decay="usual")]
    output, state = delta_rule(*arrays)
    assert (output.dtype, state.dtype) == (mx.bfloat16, mx.float32)


def test_memory_of_gradients_is_linear_in_the_number_of_tokens() -> None:
    """Four times the tokens need less than twice the memory, because segments do not hold memory at the same time."""

    def peak(S: int) -> int:
        arrays = inputs(0, S, channels=False, decay="usual")
        mx.eval(arrays)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(lambda *arrays: mx.sum(delta_rule(*arrays)[0] ** 2))(*arrays))
        return mx.get_peak_memory() - before

    assert peak(2048) < 2 * peak(512)
