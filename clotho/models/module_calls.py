"""Calls of modules that are watched or replaced for a while: modules change their class and stay the same objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.nn as nn


def called(cls: type[Any], call: Callable[..., Any]) -> type[Any]:
    """Return a subclass whose instances are called in another way."""
    return type(cls.__name__, (cls,), {"__call__": call})


@contextmanager
def with_classes(modules: Iterable[nn.Module], change: Callable[[type[nn.Module]], type[nn.Module]]) -> Iterator[None]:
    """Give the modules other classes inside the context. change: called for one module after another with its class."""
    plain = [(module, type(module)) for module in modules]
    try:
        for module, cls in plain:
            module.__class__ = change(cls)
        yield
    finally:
        for module, cls in plain:
            module.__class__ = cls


class Call(NamedTuple):
    """A call of a module: its first argument and its result."""

    module: nn.Module
    given: Any
    result: Any


@contextmanager
def watched_calls(modules: Iterable[nn.Module]) -> Iterator[list[Call]]:
    """Record every call of `modules` inside the context."""
    calls: list[Call] = []

    def watching(cls: type[Any]) -> type[Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = cls.__call__(module, *args, **kwargs)
            calls.append(Call(module, args[0] if args else None, result))
            return result

        return called(cls, call)

    with with_classes(modules, watching):
        yield calls
