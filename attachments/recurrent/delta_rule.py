"""The gated delta rule over whole sequences in chunks, whose backward pass computes chunks again.

Per head, a state S of (K, V) numbers, where K and V are the sizes of keys and values, is updated at every token
(arXiv:2412.06464; with a decay per channel of the key: arXiv:2510.26692):

    S_t = exp(g_t) S_(t-1) + k_t d_t^T,  d_t = beta_t (v_t - (exp(g_t) S_(t-1))^T k_t),  y_t = S_t^T q_t

A loop over tokens keeps a state for every token. Here the tokens of a chunk are computed together (arXiv:2406.06484).
With D_ij = g_(j+1) + ... + g_i, the decay between two tokens of a chunk, and the state S before the chunk,

    (I + A) d = beta (v - (exp(D_i0) k)^T S),  A_ij = beta_i k_i^T exp(D_ij) k_j for j < i.

Every exponent is a sum of logarithms over the tokens in between, at most 0. It is not a difference of two longer sums,
whose rounding errors would be large, and nothing is divided by a decay, which may underflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from clotho.backend import backend

Arrays = Sequence[mx.array]
Step = Callable[..., Arrays]


def recomputed_scan(step: Step, tokens: Arrays, state: Arrays, *, axis: int, size: int) -> tuple[mx.array, Arrays]:
    """Compute `step(*tokens, *state)` piece by piece; return all outputs and the last state.

    A step returns its outputs and the arrays of the next state. The tokens of a piece are `size` entries of `axis`, and
    so are its outputs. The graph keeps the tokens and one state per piece (arXiv:1604.06174). The
    pieces are one chain in both passes: of a wider graph, MLX would evaluate the parts in an order that holds the
    arrays of many pieces at once.
    """
    length, T = tokens[0].shape[axis], len(tokens)
    starts = range(0, length, size)

    def piece(arrays: Arrays, start: int) -> list[mx.array]:
        return [array[_within(axis, start, size)] for array in arrays]

    def forward(*arrays: mx.array) -> list[mx.array]:
        tokens, state = arrays[:T], list(arrays[T:])
        outputs, kept = list[mx.array](), list[mx.array]()
        for start in starts:
            kept += state
            output, *state = step(*piece(tokens, start), *state)
            outputs = [_placed(outputs, output, axis, start, length)]
        return [*outputs, *state, *kept]

    def backward(arrays: Arrays, cotangents: Arrays, results: Arrays) -> list[mx.array]:
        """Return the gradients of all arrays: pieces from last to first, each computed again from its state."""
        tokens, S = arrays[:T], len(state)
        of_state, kept = list(cotangents[1 : 1 + S]), results[1 + S :]
        of_tokens: list[list[mx.array]] = [[] for _ in tokens]
        for index, start in reversed(list(enumerate(starts))):
            given = [*piece(cotangents[:1], start), *of_state]
            own = [*piece(tokens, start), *kept[index * S : (index + 1) * S]]
            _, found = mx.vjp(step, mx.depends(own, given), given)
            found = mx.depends(found, found)
            of_state = list(found[T:])
            of_tokens = [
                [_placed(whole, one, axis, start, length)] for whole, one in zip(of_tokens, found[:T], strict=True)
            ]
        return [*(whole for (whole,) in of_tokens), *of_state]

    scan: Any = mx.custom_function(forward)
    scan.vjp(backward)
    output, *rest = scan(*tokens, *state)
    return output, rest[: len(state)]


def _within(axis: int, start: int, size: int) -> tuple[slice, ...]:
    return *[slice(None)] * axis, slice(start, start + size)


def _placed(wholes: Arrays, part: mx.array, axis: int, start: int, length: int) -> mx.array:
    """Return the whole array, if there is one yet, with a part of it; `axis` of the whole has this length."""
    if part.shape[axis] == length:
        return part
    shape = (*part.shape[:axis], length, *part.shape[axis + 1 :])
    whole = wholes[0] if wholes else mx.zeros(shape, dtype=part.dtype)
    whole[_within(axis, start, part.shape[axis])] = part
    return whole


CHUNK = 64
"""Maximum number of tokens of a chunk, a power of two."""

SEGMENT = 8
"""Number of chunks, of all rows together, that keep one state and are computed again together; two per row at least."""


class Tokens(NamedTuple):
    """What the tokens contribute, with N chunks of C tokens each; X stands for rows and heads.

    queries, keys: (X, N, C, K). values: (X, N, C, V). log_decay: (X, N, C, K), or (X, N, C, 1) for one decay per head.
    beta: (X, N, C, 1). The axes of X broadcast.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    log_decay: mx.array
    beta: mx.array


def delta_rule(
    queries_B_S_G_K: mx.array,
    keys_B_S_G_K: mx.array,
    values_B_S_H_V: mx.array,
    log_decay: mx.array,
    beta_B_S_H: mx.array,
    state_B_H_V_K: mx.array,
    mask_B_S: mx.array | None = None,
    *,
    masked: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """Compute all outputs, (B, S, H, V) in the type of the queries, and the last state, (B, H, V, K) in float32.

    G heads of queries and keys serve H / G heads of values each. log_decay: (B, S, H), or (B, S, H, K) for a decay per
    channel; at most 0. mask: tokens that the state takes in; outputs of the others are not defined. masked: logarithm
    of the decay of the state at the others.
    """
    B, S, G, K = queries_B_S_G_K.shape
    H, V = values_B_S_H_V.shape[2:]
    C = min(CHUNK, 1 << (S - 1).bit_length())
    if mask_B_S is not None:
        log_decay = mx.where(mask_B_S.reshape(B, S, *[1] * (log_decay.ndim - 2)), log_decay, masked)
        beta_B_S_H = mx.where(mask_B_S[..., None], beta_B_S_H, 0)

    def chunked(array: mx.array, heads: tuple[int, int]) -> mx.array:
        array_B_S_H_D = array.reshape(B, S, heads[0] * heads[1], -1)
        padded = mx.pad(array_B_S_H_D, [(0, 0), (0, -S % C), (0, 0), (0, 0)])
        return padded.reshape(B, -1, C, *heads, padded.shape[-1]).transpose(0, 3, 4, 1, 2, 5)

    per_value = (G, H // G)
    tokens = Tokens(
        queries=chunked(queries_B_S_G_K, (G, 1)),
        keys=chunked(keys_B_S_G_K, (G, 1)),
        values=chunked(values_B_S_H_V, per_value),
        log_decay=chunked(log_decay, per_value),
        beta=chunked(beta_B_S_H, per_value),
    )
    state_X_1_K_V = state_B_H_V_K.astype(mx.float32).reshape(B, *per_value, 1, V, K).swapaxes(-1, -2)
    output_B_G_R_N_C_V, (state_X_1_K_V,) = recomputed_scan(
        _segment, tokens, [state_X_1_K_V], axis=3, size=max(2, SEGMENT // B)
    )
    output_B_S_H_V = output_B_G_R_N_C_V.transpose(0, 3, 4, 1, 2, 5).reshape(B, -1, H, V)[:, :S]
    return output_B_S_H_V.astype(queries_B_S_G_K.dtype), state_X_1_K_V.swapaxes(-1, -2).reshape(B, H, V, K)


def _segment(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    """Compute the outputs of a few chunks, (X, N, C, V), and the state after them. arrays: `Tokens` and the state."""
    *tokens, state_X_1_K_V = arrays
    queries, keys, values, log_decay, beta = (array.astype(mx.float32) for array in tokens)
    C = keys.shape[-2]
    since_start = _exp(mx.cumsum(log_decay, axis=-2))
    to_end = _exp(_sum_after(log_decay))
    scores_of = _scores if log_decay.shape[-1] == 1 else _scores_per_channel
    key_scores, query_scores = scores_of(queries, keys, log_decay)
    inverse_C_C = _unit_inverse(mx.tril(beta * key_scores, -1))
    own = inverse_C_C @ (beta * values)
    seen = inverse_C_C @ (beta * since_start * keys)
    decay_K_1 = since_start[..., C - 1 :, :].swapaxes(-1, -2)
    by_chunk = (queries * since_start, query_scores, own, seen, (keys * to_end).swapaxes(-1, -2), decay_K_1)
    outputs = []
    for q_C_K, scores_C_C, own_C_V, seen_C_K, k_K_C, decay in zip(
        *(mx.split(array, array.shape[-3], axis=-3) for array in by_chunk), strict=True
    ):
        change_C_V = own_C_V - seen_C_K @ state_X_1_K_V
        outputs.append(q_C_K @ state_X_1_K_V + scores_C_C @ change_C_V)
        state_X_1_K_V = decay * state_X_1_K_V + k_K_C @ change_C_V
    return mx.concatenate(outputs, axis=-3), state_X_1_K_V


def state_space_chunk(*arrays: mx.array) -> tuple[mx.array, mx.array]:
    """Compute the outputs (R, C, H, P) of a chunk of a state-space layer without D, and the next state (R, H, P, K).

    arrays: inputs x (R, C, H, P), keys and queries (R, C, G, K), steps dt and logarithms of decays (R, C, H), and the
    state. The equation is that of the gated delta rule with d_t = dt_t x_t (Mamba-2: arXiv:2405.21060).
    """
    x_R_C_H_P, keys_R_C_G_K, queries_R_C_G_K, dt_R_C_H, log_decay_R_C_H, state_R_H_P_K = arrays
    R, C, H, P = x_R_C_H_P.shape
    G, K = keys_R_C_G_K.shape[2:]

    def by_head(array: mx.array) -> mx.array:
        return array.astype(mx.float32).reshape(R, C, G, array.shape[2] // G, -1).transpose(0, 2, 3, 1, 4)

    keys, queries, log_decay = by_head(keys_R_C_G_K), by_head(queries_R_C_G_K), by_head(log_decay_R_C_H)
    change_C_P = by_head(x_R_C_H_P) * by_head(dt_R_C_H)
    state_K_P = state_R_H_P_K.astype(mx.float32).reshape(R, G, -1, P, K).swapaxes(-1, -2)
    since_start, keys_K_C = _exp(mx.cumsum(log_decay, axis=-2)), keys.swapaxes(-1, -2)
    output = (queries @ keys_K_C * _decay_between(log_decay)) @ change_C_P + since_start * (queries @ state_K_P)
    last = since_start[..., C - 1 :, :] * state_K_P + keys_K_C @ (_exp(_sum_after(log_decay)) * change_C_P)
    output_R_C_H_P = output.transpose(0, 3, 1, 2, 4).reshape(R, C, H, P)
    return output_R_C_H_P.astype(x_R_C_H_P.dtype), last.swapaxes(-1, -2).reshape(R, H, P, K)


def _exp(array: mx.array) -> mx.array:
    """Return e^x as the backend computes it."""
    return backend().exp(array)


def _sum_after(log_decay: mx.array) -> mx.array:
    """Return the sum of the logarithms after each token of a chunk, up to its end."""
    return mx.cumsum(log_decay, axis=-2, reverse=True, inclusive=False)


def _decay_between(log_decay_C_1: mx.array) -> mx.array:
    """Return exp(D_ij), the decay from token j to token i of a chunk; 0 for later tokens j."""
    C = log_decay_C_1.shape[-2]
    between_C_C = mx.cumsum(mx.tril(mx.broadcast_to(log_decay_C_1, (*log_decay_C_1.shape[:-1], C)), -1), axis=-2)
    return mx.tril(_exp(between_C_C))


def _scores(queries: mx.array, keys: mx.array, log_decay: mx.array) -> tuple[mx.array, mx.array]:
    """Return the products of keys with keys and of queries with keys, with the decay of a head; 0 for later tokens."""
    decay_C_C = _decay_between(log_decay)
    keys_K_C = keys.swapaxes(-1, -2)
    return (keys @ keys_K_C) * decay_C_C, (queries @ keys_K_C) * decay_C_C


def _scores_per_channel(queries: mx.array, keys: mx.array, log_decay: mx.array) -> tuple[mx.array, mx.array]:
    """Return the products of `_scores` with a decay per channel, for which exp(D_ij) is not a factor of the product.

    Blocks of twice the size are made of two blocks: exp(D_ij) for a query of the second and a key of the first is the
    product of the decay since the start of the second block and the decay up to the end of the first one.
    """
    C, K = keys.shape[-2:]
    log_decay, _ = mx.broadcast_arrays(log_decay, keys)
    queries, keys = mx.broadcast_to(queries, log_decay.shape), mx.broadcast_to(keys, log_decay.shape)
    found = [mx.sum(array * keys, axis=-1)[..., None, None] for array in (keys, queries)]
    size = 1
    while size < C:
        pairs = (*keys.shape[:-2], C // (2 * size), 2, size, K)
        both = log_decay.reshape(pairs)
        since, until = _exp(mx.cumsum(both[..., 1, :, :], axis=-2)), _exp(_sum_after(both[..., 0, :, :]))
        first_K_C = (keys.reshape(pairs)[..., 0, :, :] * until).swapaxes(-1, -2)
        found = [
            _joined(block, (array.reshape(pairs)[..., 1, :, :] * since) @ first_K_C)
            for block, array in zip(found, (keys, queries), strict=True)
        ]
        size *= 2
    key_scores, query_scores = (block.squeeze(-3) for block in found)
    return key_scores, query_scores


def _unit_inverse(lower_C_C: mx.array) -> mx.array:
    """Return the inverse of I + `lower`, a strictly lower triangular matrix, whose size is a power of two.

    [[P, 0], [Q, R]] has the inverse [[P', 0], [-R' Q P', R']], with the inverses P' and R' of its blocks. Sums of
    powers of the matrix would have large terms that cancel where keys repeat.
    """
    C = lower_C_C.shape[-1]
    inverse = mx.ones((*lower_C_C.shape[:-1], 1, 1))
    size = 1
    while size < C:
        pairs = C // (2 * size)
        blocks = lower_C_C.reshape(*lower_C_C.shape[:-2], pairs, 2, size, pairs, 2, size)[..., 1, :, :, 0, :]
        below = mx.diagonal(blocks, axis1=-4, axis2=-2)
        below = mx.moveaxis(below, -1, -3)
        halves = inverse.reshape(*inverse.shape[:-3], pairs, 2, size, size)
        first, second = halves[..., 0, :, :], halves[..., 1, :, :]
        inverse = _joined(inverse, -(second @ below @ first))
        size *= 2
    return inverse.squeeze(-3)


def _joined(blocks: mx.array, below: mx.array) -> mx.array:
    """Join pairs of lower triangular blocks (..., 2 n, s, s), with what is below the first: (..., n, 2 s, 2 s)."""
    size = blocks.shape[-1]
    halves = blocks.reshape(*blocks.shape[:-3], -1, 2, size, size)
    upper = mx.pad(halves[..., 0, :, :], [(0, 0)] * (below.ndim - 1) + [(0, size)])
    return mx.concatenate([upper, mx.concatenate([below, halves[..., 1, :, :]], axis=-1)], axis=-2)
