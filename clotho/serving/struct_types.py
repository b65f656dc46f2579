"""Prepares msgspec Struct types for decoding in several threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from weakref import WeakSet

from msgspec import Struct
from msgspec.json import Decoder

_prepared: WeakSet[type[Struct]] = WeakSet()


def prepare_struct_types() -> frozenset[type[Struct]]:
    """Build the decoding table of each Struct type that is defined, and return the types that are new since last time.

    msgspec builds the table of a type when a value of the type is decoded for the first time, and other threads can see
    an incomplete table: in msgspec 0.22, two threads that decode the first values of a type with a field of another
    Struct type can crash the process.
    A type whose annotations msgspec does not support is left out. Call before threads decode, and after the imports.
    """
    new = frozenset(_subclasses(Struct)) - frozenset(_prepared)
    for kind in new:
        with suppress(Exception):  # annotations are evaluated, and those of a custom actor can raise anything
            Decoder(kind)
        _prepared.add(kind)
    return new


def _subclasses(kind: type[Struct]) -> Iterator[type[Struct]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
