"""Adapters that a server holds in memory, as its clients see them."""

from __future__ import annotations

from msgspec import Struct


class AdapterInfo(Struct, frozen=True, kw_only=True):
    """A loaded adapter.

    version: number of the load; a reload in place has a greater one. fingerprint: of the float32 weights and scales.
    rank: the largest rank of any module. targets: names of the adapted modules, sorted. path: the directory that the
    weights were read from. bytes: size of the float32 weights.
    """

    name: str
    version: int
    fingerprint: str
    rank: int
    targets: tuple[str, ...]
    path: str
    bytes: int
