"""Gradient checkpointing of the blocks of one model inside a context: less memory for a second forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import _BaseCache

from clotho.models.attention import KeysAndValues, LayerKeys


@contextmanager
def checkpointed_blocks(blocks: list[nn.Module]) -> Iterator[None]:
    """Inside, each block keeps only its input and recomputes its activations in the backward pass (arXiv:1604.06174).

    Gradients are unchanged. Keys and values that a block passes to another block, or to a later pass over the blocks
    (`LayerKeys`), are inputs and outputs of the recomputed function, so gradients flow through them. A block that gets
    a cache of mlx-lm, which has no such outputs, keeps all its activations.
    mlx-lm's `grad_checkpoint` changes the class permanently, also for decoding and for other models of the process.
    Here the blocks change their class for the duration of the context.
    """
    plain = [type(block) for block in blocks]
    classes = {cls: _checkpointed_class(cls) for cls in set(plain)}
    try:
        for block, cls in zip(blocks, plain, strict=True):
            block.__class__ = classes[cls]
        yield
    finally:
        for block, cls in zip(blocks, plain, strict=True):
            block.__class__ = cls


def _checkpointed_class(cls: type[Any]) -> type[Any]:
    forward = cls.__call__

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute a block, and keep its inputs only."""
        given = (*args, *kwargs.values())
        if any(isinstance(arg, _BaseCache) for arg in given):
            return forward(block, *args, **kwargs)
        keys = next((arg for arg in given if isinstance(arg, LayerKeys)), LayerKeys())

        def inner(parameters: Any, held: KeysAndValues, *args: Any, **kwargs: Any) -> tuple[Any, KeysAndValues]:
            """Compute the block with its parameters, and with keys and values of other blocks, as inputs."""
            block.update(parameters)
            own = keys.holding(held)  # recomputed keys must be neither visible to others nor kept alive

            def mine(arg: Any) -> Any:
                return own if arg is keys else arg

            output = forward(block, *map(mine, args), **{name: mine(arg) for name, arg in kwargs.items()})
            # New nodes, because returning the same array twice would lose a gradient if a block also returns its keys.
            return output, tuple(mx.contiguous(array) for array in own.held)

        output, keys.held = mx.checkpoint(inner)(block.trainable_parameters(), keys.held, *args, **kwargs)
        return output

    return type(cls.__name__, (cls,), {"__call__": call})
