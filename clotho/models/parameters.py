"""Parameter trees: as flat dictionaries of named arrays, as slots in the model, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten

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


def as_parameters(values: Mapping[str, Any], like: Arrays) -> Arrays:
    """Return NumPy or MLX arrays as evaluated MLX arrays; an array has the type of the same name in `like`, if any."""
    arrays = {name: value if isinstance(value, mx.array) else mx.array(value) for name, value in values.items()}
    arrays = {name: array.astype(like[name].dtype) if name in like else array for name, array in arrays.items()}
    mx.eval(arrays)
    return arrays


BLOCK = 1 << 15
"""Number of 64-bit words that are reduced to one."""

AT_ONCE = 16
"""Number of blocks that are reduced at a time: 4 MB stay in the processor's cache between operations."""


def fingerprint(parameters: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a parameter tree: names, types, shapes and a digest of the bits.

    The bits of an array are read as 64-bit words. Every block of words is reduced on the device to

        sum over i of (w_i xor (w_i >> 32)) c_i  mod 2^64,  with fixed random odd c_i,

    which is multilinear hashing (Carter and Wegman, 1979) after a shift that makes high bits count. Every term is a
    bijection of its word, so blocks that differ in one word have different sums. Integers do not round, so the sum is
    the same in any order and on any backend. The words after the last whole block are hashed directly.

    Detects accidents, not forgery. Evaluates the arrays. The order of dictionaries and empty branches do not matter.
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


def layout(parameters: Parameters) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the names, types and shapes of a parameter tree."""
    lines = [f"{name} {array.dtype} {array.shape}\n" for name, array in flat(parameters).items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _parts(array: mx.array) -> list[mx.array]:
    """Return the evaluated sums of the whole blocks of an array, and the rest of the array."""
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


def locate(model: nn.Module, path: str) -> tuple[Any, Any]:
    """Return the dictionary or list that holds the item `path`, and the key of the item in it."""
    *outer, last = path.split(".")
    node: Any = model
    for part in outer:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node, int(last) if isinstance(node, list) else last


class ParameterSlots:
    """The places of a model's trainable parameters, by their dotted names in order; computed once."""

    def __init__(self, model: nn.Module) -> None:
        """Use the parameters that are trainable now. The modules of the model must stay the same objects."""
        parameters: Parameters = model.trainable_parameters()
        arrays = flat(parameters)
        self._names: Parameters = tree_map_with_path(lambda name, _: name, parameters)
        self._slots = {name: locate(model, name) for name in arrays}
        self._kinds = {name: (array.shape, array.dtype) for name, array in arrays.items()}

    def current(self) -> Arrays:
        """Return the arrays that the model computes with."""
        return {name: container[key] for name, (container, key) in self._slots.items()}

    def assign(self, arrays: Arrays) -> None:
        """Let the model compute with these arrays, which `checked` returned."""
        for name, (container, key) in self._slots.items():
            container[key] = arrays[name]

    def tree(self, arrays: Arrays) -> Parameters:
        """Return the arrays as a tree with empty branches, which matches the tree of gradients."""
        tree: Parameters = tree_map(arrays.__getitem__, self._names)
        return tree

    def checked(self, parameters: Parameters) -> Arrays:
        """Return a tree's arrays by name. Raises `ValueError` unless names, shapes and types are the trainable ones."""
        arrays = flat(parameters)
        for name, kind in self._kinds.items():
            if name not in arrays:
                raise ValueError(f"parameter {name} is missing")
            array: Any = arrays[name]
            if not isinstance(array, mx.array):
                raise ValueError(f"parameter {name} is no array")
            if (array.shape, array.dtype) != kind:
                raise ValueError(f"parameter {name} is {array.dtype} {array.shape}, not {kind[1]} {kind[0]}")
        if unknown := sorted(arrays.keys() - self._kinds.keys()):
            raise ValueError(f"not trainable parameters: {', '.join(unknown)}")
        return arrays
