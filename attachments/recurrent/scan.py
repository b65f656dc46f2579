"""A step over the tokens of a sequence in pieces, whose backward pass computes each piece again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

Arrays = Sequence[mx.array]
Step = Callable[..., Arrays]


def recomputed_scan(
    step: Step, tokens: Arrays, state: Arrays, constants: Arrays = (), *, axis: int, size: int
) -> tuple[mx.array, Arrays]:
    """Compute `step(start, *tokens, *state, *constants)` piece by piece; return all outputs and the last state.

    A step returns its outputs and the arrays of the next state. The tokens of a piece are the `size` entries of `axis`
    from `start` on, and so are its outputs. The graph keeps the tokens and one state per piece (arXiv:1604.06174). The
    pieces are one chain in both passes: of a wider graph, MLX would evaluate the parts in an order that holds the
    arrays of many pieces at once.
    """
    length = tokens[0].shape[axis]
    starts = range(0, length, size)

    def piece(arrays: Arrays, start: int) -> list[mx.array]:
        return [array[_within(axis, start, size)] for array in arrays]

    def parts(arrays: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        stateful = len(tokens) + len(state)
        return arrays[: len(tokens)], arrays[len(tokens) : stateful], arrays[stateful:]

    def forward(*arrays: mx.array) -> list[mx.array]:
        tokens, state, constants = parts(arrays)
        outputs, kept = list[mx.array](), list[mx.array]()
        for start in starts:
            kept += state
            output, *state = step(start, *piece(tokens, start), *state, *constants)
            outputs = [_placed(outputs, output, axis, start, length)]
        return [*outputs, *state, *kept]

    def backward(arrays: Arrays, cotangents: Arrays, results: Arrays) -> list[mx.array]:
        """Return the gradients of all arrays: pieces from last to first, each computed again from its state."""
        tokens, state, constants = parts(arrays)
        S = len(state)
        of_state, kept = list(cotangents[1 : 1 + S]), results[1 + S :]
        of_tokens: list[list[mx.array]] = [[] for _ in tokens]
        of_constants = [mx.zeros_like(array) for array in constants]
        for index, start in reversed(list(enumerate(starts))):
            given = [*piece(cotangents[:1], start), *of_state]
            own = [*piece(tokens, start), *kept[index * S : (index + 1) * S], *constants]
            _, found = mx.vjp(partial(step, start), mx.depends(own, given), given)
            of_own, before, of_all = parts(mx.depends(found, found))
            of_state = list(before)
            of_tokens = [
                [_placed(whole, own, axis, start, length)] for whole, own in zip(of_tokens, of_own, strict=True)
            ]
            of_constants = [whole + own for whole, own in zip(of_constants, of_all, strict=True)]
        return [*(whole for (whole,) in of_tokens), *of_state, *of_constants]

    scan: Any = mx.custom_function(forward)
    scan.vjp(backward)
    output, *rest = scan(*tokens, *state, *constants)
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
