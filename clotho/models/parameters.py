"""Parameter trees as flat dictionaries, `model.layers.0.self_attn.q_proj.lora_a` -> array, and back.

A name for a set of weights: equal weights have equal fingerprints.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

Parameters = dict[str, Any]
"""Nested dictionaries and lists of arrays, as `nn.Module.trainable_parameters()` gives them; branches may be empty."""


Arrays = dict[str, mx.array]
"""Arrays by parameter name, such as `model.layers.0.self_attn.q_proj.lora_a`."""


def flat(tree: Parameters) -> dict[str, mx.array]:
    """Name the arrays of a nested tree by their path, in the order of the names."""
    leaves = tree_flatten(tree)
    assert isinstance(leaves, list)
    return dict(sorted(leaves, key=lambda leaf: leaf[0]))


def nested(arrays: dict[str, mx.array]) -> Parameters:
    """Rebuild the nested tree of `flat`, lists of layers included. Arrays are shared, not copied."""
    tree: Parameters = tree_unflatten(list(arrays.items())) if arrays else {}
    return tree


BLOCK = 1 << 15
"""64-bit words that are reduced to one."""

AT_ONCE = 16
"""Blocks that are reduced at a time, 4 MB: so many stay in a processor's cache between the operations."""


def fingerprint(parameters: Any) -> str:
    """First 16 hexadecimal digits of the SHA-256 of a parameter tree: names, types, shapes, and a digest of the bits.

    The bits of an array are words of 64, and every block of them is reduced where the array lies to

        sum over i of (w_i xor (w_i >> 32)) c_i  mod 2^64,  with fixed random odd c_i,

    multilinear hashing (Carter and Wegman, 1979) after a shift that lets high bits count as well. Every term is
    one-to-one in its word, so a block of which one word differs always has another sum; integers have no rounding, so
    the sum is the same in any order, on any backend. What is left after the last whole block is hashed as it is.

    Guards against accidents, not against forgery. Evaluates the arrays. The order of dictionaries and empty branches
    of the tree do not matter.
    """
    digest = hashlib.sha256()
    arrays = flat(parameters)
    mx.eval(arrays)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        for part in _parts(array):
            view = memoryview(part)  # type: ignore[arg-type]
            digest.update(view if view.c_contiguous else view.tobytes())
    return digest.hexdigest()[:16]


def _parts(array: mx.array) -> list[mx.array]:
    """Sums of the whole blocks of an array, then what is left of it; evaluated, few at a time."""
    block = BLOCK * 8 // array.itemsize
    whole = array.size // block
    if not whole:
        return [array]
    line = array.reshape(-1)
    parts = []
    for first in range(0, whole, AT_ONCE):
        last = min(first + AT_ONCE, whole)
        words = mx.view(line[first * block : last * block], mx.uint64).reshape(last - first, BLOCK)
        parts.append(((words ^ (words >> 32)) * _constants()).sum(axis=1))
        mx.async_eval(parts[-1])
    parts.append(line[whole * block :])
    mx.eval(parts)
    return parts


@cache
def _constants() -> mx.array:
    return mx.array(np.random.PCG64(0).random_raw(BLOCK) | np.uint64(1))
