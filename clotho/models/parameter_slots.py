"""Where the trainable parameters of a model live, worked out once, so that setting them all is a loop of pointers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from clotho.models.lora import locate
from clotho.models.parameters import flat

Parameters = dict[str, Any]
"""Nested dictionaries and lists of arrays, as `nn.Module.trainable_parameters()` gives them."""


class ParameterPlaces:
    """The places of a model's trainable parameters, in the order of their dotted names."""

    def __init__(self, model: nn.Module) -> None:
        """Take the parameters that are trainable now; the model's modules must stay the same objects."""
        parameters: Parameters = model.trainable_parameters()
        arrays = flat(parameters)
        self.names = tuple(arrays)
        self._structure: Parameters = tree_map(lambda _: None, parameters)
        self._paths = tuple(tuple(int(part) if part.isdigit() else part for part in name.split(".")) for name in arrays)
        self._places = tuple(locate(model, name) for name in arrays)
        self._kinds = tuple((array.shape, array.dtype) for array in arrays.values())

    def current(self) -> list[mx.array]:
        """The arrays that the model computes with."""
        return [container[key] for container, key in self._places]

    def assign(self, leaves: list[mx.array]) -> None:
        """Let the model compute with these arrays, which `leaves` has checked."""
        for (container, key), array in zip(self._places, leaves, strict=True):
            container[key] = array

    def tree(self, leaves: list[mx.array]) -> Parameters:
        """The arrays as a tree, empty branches included, so that it matches the tree of gradients."""
        tree: Parameters = tree_map(lambda _: None, self._structure)
        for path, array in zip(self._paths, leaves, strict=True):
            node: Any = tree
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = array
        return tree

    def leaves(self, parameters: Parameters) -> list[mx.array]:
        """The arrays of a tree in the order of the places they belong to.

        Raises `ValueError` unless the tree has exactly the names, shapes and types of the trainable parameters.
        """
        leaves: list[mx.array] = []
        for path, kind in zip(self._paths, self._kinds, strict=True):
            node: Any = parameters
            try:
                for part in path:
                    node = node[part]
            except (KeyError, IndexError, TypeError):
                raise ValueError(f"parameter {_dotted(path)} is missing") from None
            if not isinstance(node, mx.array):
                raise ValueError(f"parameter {_dotted(path)} is no array")
            if (node.shape, node.dtype) != kind:
                raise ValueError(f"parameter {_dotted(path)} is {node.dtype} {node.shape}, not {kind[1]} {kind[0]}")
            leaves.append(node)
        if _count(parameters) != len(leaves):
            known = {_dotted(path) for path in self._paths}
            raise ValueError(f"not trainable parameters: {', '.join(sorted(flat(parameters).keys() - known))}")
        return leaves


def _count(tree: Any) -> int:
    """How many leaves a tree has."""
    if isinstance(tree, dict):
        return sum(map(_count, tree.values()))
    if isinstance(tree, (list, tuple)):
        return sum(map(_count, tree))
    return 1


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))
