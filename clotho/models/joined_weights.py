"""Frozen weights of linear layers that read the same input, as the rows of one matrix: one product computes all layers.

The layers keep their names: the weights of each layer become a view of its rows, which takes no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

JOINABLE = (nn.Linear, nn.QuantizedLinear)
ARRAYS = ("weight", "scales", "biases", "bias")
"""Arrays of these layers, with one row per output."""


class JoinedLinear:
    """One linear layer with the outputs of several, in their order."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Join layers that `can_join`; evaluates their weights, and makes them views of the joined ones."""
        first: Any = layers[0]
        self._layer: Any = copy.copy(first)
        rows = [layer.weight.shape[0] for layer in layers]
        self._ends = list(accumulate(rows))[:-1]
        for key in ARRAYS:
            if key not in first:
                continue
            joined = mx.concatenate([layer[key] for layer in layers], axis=0)
            mx.eval(joined)
            views = mx.split(joined, self._ends, axis=0)
            mx.eval(views)
            self._layer[key] = joined
            for layer, view in zip(layers, views, strict=True):
                layer[key] = view

    def __call__(self, x: mx.array) -> mx.array:
        """Compute the outputs of all layers, (..., outputs), of x, (..., inputs)."""
        y: mx.array = self._layer(x)
        return y

    def parts(self, y: mx.array) -> tuple[mx.array, ...]:
        """Return the outputs of each layer."""
        return tuple(mx.split(y, self._ends, axis=-1))


def can_join(layers: Sequence[nn.Module]) -> bool:
    """Whether the layers are several frozen linear layers of one form: class, quantization, types and arrays."""
    forms = {_form(layer) for layer in layers}
    return len(layers) > 1 and len(forms) == 1 and None not in forms


def _form(layer: nn.Module) -> tuple[Any, ...] | None:
    if type(layer) not in JOINABLE or layer.trainable_parameters():
        return None
    quantization = tuple(getattr(layer, key, None) for key in ("bits", "group_size", "mode"))
    return (
        type(layer),
        *quantization,
        *((key, layer[key].dtype, layer[key].shape[1:]) for key in ARRAYS if key in layer),
    )


class SharedResult:
    """A result that several layers read, kept until each has read it or one gets another input."""

    _input: tuple[Any, ...]
    _result: Any
    _waiting: set[int]

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self.forget()

    def read(self, reader: int, given: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Return the result of `compute` for the input `given`. reader: number of the layer."""
        if reader not in self._waiting or not are_same(given, self._input):
            self._input, self._result = given, compute()
            self._waiting = set(range(self._readers))
        result = self._result
        self._waiting.discard(reader)
        if not self._waiting:
            self.forget()
        return result

    def forget(self) -> None:
        """Release input and result."""
        self._input, self._result, self._waiting = (), None, set()


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences consist of the same objects."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _Joined:
    """A frozen layer whose outputs are part of those of a `JoinedLinear`."""

    joined: JoinedLinear
    results: SharedResult
    index: int

    def __call__(self, x: mx.array) -> mx.array:
        """Compute y, (..., outputs), of x, (..., inputs)."""
        parts = self.results.read(self.index, (x,), lambda: self.joined.parts(self.joined(x)))
        y: mx.array = parts[self.index]
        return y


class JoinedPlainLinear(_Joined, nn.Linear):
    """A layer with plain weights."""


class JoinedQuantizedLinear(_Joined, nn.QuantizedLinear):
    """A layer with quantized weights."""


CLASSES: dict[type, type] = {nn.Linear: JoinedPlainLinear, nn.QuantizedLinear: JoinedQuantizedLinear}


def join(layers: Sequence[nn.Module]) -> None:
    """Let one product compute layers that read the same input, if they `can_join`. Modules stay the same objects."""
    if not can_join(layers):
        return
    joined, results = JoinedLinear(layers), SharedResult(len(layers))
    for index, layer in enumerate(layers):
        joining: Any = layer
        joining.__class__ = CLASSES[type(layer)]
        joining.joined, joining.results, joining.index = joined, results, index
