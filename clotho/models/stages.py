"""Stages of a computation graph: arrays that are evaluated one after another, with other work in between.

MLX builds the graph of a micro-batch first and computes it on evaluation. Evaluating the output of a block first, then
that of the next block, and so on, computes the same nodes in the same way as one evaluation of the result. Stages
therefore change neither results nor memory; they divide the time of an evaluation into parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import count
from typing import Any, Literal, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from clotho.models.module_calls import called, with_classes

Kind = Literal[
    "attention",
    "block",
    "prefill",
    "head",
    "head gradient",
    "attention gradient",
    "block gradient",
    "other gradients",
    "optimizer",
]


class Stage(NamedTuple):
    """Arrays that are evaluated together.

    work: size of the computation, in a unit that depends on the kind only: positions, rows, parameters, or pairs of
    query and key. Two stages of a kind take times in proportion to their work.
    """

    kind: Kind
    arrays: Sequence[mx.array]
    work: int


class Stages:
    """The stages of one graph, in the order of the computation: blocks, then chunks of the head, then gradients.

    block: number of the block whose pass is being built; None outside the blocks.
    """

    block: int | None = None

    def __init__(self) -> None:
        self._forward: list[Stage] = []
        self._backward: dict[int, list[Stage]] = {}
        self._positions: dict[int, int] = {}
        self._cotangents: dict[int, list[mx.array]] = {}

    @property
    def has_blocks(self) -> bool:
        """Whether the graph contains the output of a block."""
        return bool(self._positions)

    def mark(self, stage: Stage) -> None:
        """Record the next stage."""
        self._forward.append(stage)

    @contextmanager
    def backward_of(self, block: int) -> Iterator[None]:
        """Record what is marked inside before the gradients of a block, unless a pass is being built already."""
        if self.block is not None:
            yield
            return
        forward, self._forward = self._forward, self._backward.setdefault(block, [])
        self.block = block
        try:
            yield
        finally:
            self._forward, self.block = forward, None

    def computed(self, index: int, x: Any, output: Any) -> None:
        """Record the output of block number `index` for the input `x`, (B, S, D)."""
        arrays = [array for _, array in cast(list[Any], tree_flatten(output)) if isinstance(array, mx.array)]
        positions = x.size // x.shape[-1] if isinstance(x, mx.array) else 1
        self._positions[index] = self._positions.get(index, 0) + positions
        self._forward.append(Stage("block", arrays, positions))

    def watched(self, index: int, x: mx.array) -> mx.array:
        """Return the input `x` of a block; its cotangent will be recorded when the backward pass is built."""
        return watched(x, self._cotangents.setdefault(index, []))

    def take(self, gradients: dict[str, mx.array] | None = None) -> list[Stage]:
        """Return all stages; with gradients by parameter name, the backward pass follows, from last to first block.

        A stage of the backward pass contains the gradients of one block and the cotangents of its inputs, because the
        next stage would otherwise hold the activations of two blocks. The arrays now belong to the caller.
        """
        forward, inside, positions, cotangents = self._forward, self._backward, self._positions, self._cotangents
        self._forward, self._backward, self._positions, self._cotangents = [], {}, {}, {}
        by_block: dict[int, list[mx.array]] = {index: cotangents.get(index, []) for index in positions}
        others: list[mx.array] = []
        for name, array in (gradients or {}).items():
            by_block.get(block_of(name), others).append(array)
        backward = [
            stage
            for index in sorted(by_block, reverse=True)
            for stage in (*inside.get(index, ()), Stage("block gradient", by_block[index], positions[index]))
        ]
        rest = Stage("other gradients", others, sum(array.size for array in others))
        return [stage for stage in (*forward, *backward, rest) if stage.arrays]


def watched(x: mx.array, cotangents: list[mx.array]) -> mx.array:
    """Return `x` unchanged; its cotangent is appended when the backward pass is built."""

    @mx.custom_function
    def watch(x: mx.array) -> mx.array:
        return x

    @watch.vjp
    def record(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        cotangents.append(cotangent)
        return cotangent

    return cast(mx.array, watch(x))


def block_of(name: str) -> int:
    """Return the number of the block that a parameter belongs to; -1 for parameters outside the blocks."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


_current: ContextVar[Stages | None] = ContextVar("stages", default=None)


def mark(kind: Kind, arrays: Sequence[mx.array], *, work: int) -> None:
    """Record a stage of the graph that is being built, if any stages are recorded."""
    stages = _current.get()
    if stages is not None:
        stages.mark(Stage(kind, arrays, work))


def current_block() -> int | None:
    """Return the number of the block whose pass is being built; None outside the blocks, or if nothing is recorded."""
    stages = _current.get()
    return None if stages is None else stages.block


def backward_of(block: int | None) -> AbstractContextManager[None]:
    """Record what is marked inside as part of the backward pass of a block, which `current_block` returned."""
    stages = _current.get()
    return nullcontext() if stages is None or block is None else stages.backward_of(block)


def after(done: Sequence[mx.array], array: mx.array) -> mx.array:
    """Return the array with a dependency on `done`, which is therefore computed first."""
    return mx.depends([array], list(done))[0] if done else array


@contextmanager
def recorded_stages(blocks: Sequence[nn.Module], *, gradients: bool) -> Iterator[Stages]:
    """Record the stages of the graph that is built inside the context. gradients: it has a backward pass."""
    stages, numbers = Stages(), count()
    token = _current.set(stages)
    try:
        with with_classes(blocks, lambda cls: _recording_class(cls, next(numbers), stages, gradients=gradients)):
            yield stages
    finally:
        _current.reset(token)


def _recording_class(cls: type[Any], index: int, stages: Stages, *, gradients: bool) -> type[Any]:
    forward = cls.__call__

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if gradients and isinstance(x, mx.array):
            args = (stages.watched(index, x), *args[1:])
        stages.block = index
        try:
            output = forward(block, *args, **kwargs)
        finally:
            stages.block = None
        stages.computed(index, x, output)
        return output

    return called(cls, call)
