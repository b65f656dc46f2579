"""Where a model turns tokens into vectors and vectors into logits: its embeddings and its head, found by watching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from protocols.errors import ModelError


class _Call(NamedTuple):
    module: nn.Module
    given: Any
    result: Any


def token_weights(model: nn.Module, *, embeddings: bool, head: bool) -> dict[str, nn.Module]:
    """The embedding modules that look tokens up, and the linear layer that ends in the logits, by name.

    Architectures give them many names, so one call of the model is watched; it is never evaluated, so weights that
    were not read yet stay unread. embeddings, head: which to return. Raises `ModelError` where the model has none of
    its own, as where embeddings and head are tied.
    """
    inside = {id(module) for block in model.layers for module in block.modules()}
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module) not in inside
    }
    tokens_1_2 = mx.zeros((1, 2), dtype=mx.int32)
    with _watched(candidates.values()) as calls:
        logits_1_2_V = model(tokens_1_2)
    looked_up = [call.module for call in calls if isinstance(call.module, nn.Embedding) and call.given is tokens_1_2]
    ends = [call.module for call in calls if isinstance(call.module, nn.Linear) and _ends_in(call, logits_1_2_V)]
    if embeddings and not looked_up:
        raise ModelError("policy.method.train_embeddings: no embedding of this architecture is called with the tokens")
    if head and not ends:
        raise ModelError(
            "policy.method.train_head: this model has no head of its own, its embeddings are the head (tied); "
            "policy.method.train_embeddings = true trains both"
        )
    wanted = [*(looked_up if embeddings else ()), *(ends[-1:] if head else ())]
    return {name: module for name, module in candidates.items() if any(module is one for one in wanted)}


def _ends_in(call: _Call, logits_1_2_V: mx.array) -> bool:
    return isinstance(call.result, mx.array) and call.result.shape[-1] == logits_1_2_V.shape[-1]


@contextmanager
def _watched(modules: Iterable[nn.Module]) -> Iterator[list[_Call]]:
    """Inside, every call of one of `modules` is noted; they change class for it, and change back."""
    calls: list[_Call] = []
    plain = [(module, type(module)) for module in modules]
    try:
        for module, cls in plain:
            module.__class__ = _watching(cls, calls)
        yield calls
    finally:
        for module, cls in plain:
            module.__class__ = cls


def _watching(cls: type[Any], calls: list[_Call]) -> type[Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = cls.__call__(module, *args, **kwargs)
        calls.append(_Call(module, args[0] if args else None, result))
        return result

    return type(cls.__name__, (cls,), {"__call__": call})
