"""Gradient checkpointing of one model's blocks, for as long as asked: memory traded for a second forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@contextmanager
def checkpointed_blocks(blocks: list[nn.Module]) -> Iterator[None]:
    """Inside, each block keeps only its input and recomputes its activations in the backward pass (arXiv:1604.06174).

    Gradients are those of the plain blocks. mlx-lm's `grad_checkpoint` patches the class for good, and with it every
    other model of the process and decoding; here the blocks change class and change back, also after an error.
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
        def inner(parameters: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            block.update(parameters)
            return forward(block, *args, **kwargs)

        return mx.checkpoint(inner)(block.trainable_parameters(), *args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call})
