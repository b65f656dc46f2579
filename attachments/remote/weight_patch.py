"""Lossless sparse patches between two versions of the weights, as in PULSE (arXiv:2602.03839).

At the learning rates of reinforcement learning, most weights in 16 bits are bitwise equal after an update. A patch has,
for every tensor with changes, the positions of the changed elements and the difference of their bits:

* position: number of equal elements before the changed element, since the changed element before;
* difference: d = new - old of the bits as unsigned integers, modulo 2^b for b bits; stored as (d << 1) xor (d >> (b-1))
  of the signed d (zigzag), which is small if a float has moved by few units in the last place.

Both are stored as planes: first the lowest bytes of all numbers, then the next ones. A plane of zeros takes almost no
space after compression (zlib).

PULSE compresses the new values; differences take less, because the receiver has the old ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from clotho.storage.tensors import CODES, StoredTensor
from protocols.errors import CheckpointError, visible

COMPRESSION = 1
"""Level of zlib: higher levels take several times as long and save a few percent."""

MOST_CHANGED = 0.5
"""Share of changed elements above which no patch is made."""

MAX_ELEMENTS = 2**31
"""Size of a tensor above which no patch is made: sums of positions stay within 64 bits."""

Bits = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


class TensorPatch(Struct, frozen=True, kw_only=True):
    """The changes of one tensor.

    changed: number of changed elements. gaps, differences: compressed planes. gap_bytes: planes of the gaps.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    changed: Annotated[int, Meta(ge=1)]
    gap_bytes: Annotated[int, Meta(ge=0, le=4)]
    gaps: bytes
    differences: bytes


class WeightPatch(Struct, frozen=True, kw_only=True):
    """The content of a patch. base, target: fingerprints of the weights before and after."""

    base: str
    target: str
    tensors: tuple[TensorPatch, ...]


def make_patch(
    base: Mapping[str, StoredTensor], target: Mapping[str, StoredTensor], *, base_fingerprint: str, fingerprint: str
) -> bytes | None:
    """Return the patch from `base` to `target`, from any thread; None if it would not be smaller than `target`.

    fingerprint: of `target`. Also None if names, shapes or types differ, or if a type is not one of `CODES`.
    """
    if {name: tensor[:2] for name, tensor in base.items()} != {name: tensor[:2] for name, tensor in target.items()}:
        return None
    if any(tensor.dtype not in CODES for tensor in target.values()):
        return None
    whole = sum(tensor.data.nbytes for tensor in target.values())
    elements = {name: tensor.data.nbytes // _item_bytes(tensor) for name, tensor in target.items()}
    if any(size > MAX_ELEMENTS for size in elements.values()):
        return None
    positions = {name: np.flatnonzero(_bits(base[name]) != _bits(target[name])) for name in target}
    if sum(found.size for found in positions.values()) > MOST_CHANGED * sum(elements.values()):
        return None
    tensors = tuple(
        _tensor_patch(name, base[name], target[name], found) for name, found in positions.items() if found.size
    )
    patch = msgspec.msgpack.encode(WeightPatch(base=base_fingerprint, target=fingerprint, tensors=tensors))
    return patch if len(patch) < whole else None


def apply_patches(
    patches: Sequence[bytes], base: Mapping[str, StoredTensor], *, base_fingerprint: str
) -> dict[str, StoredTensor]:
    """Return the weights after patches that follow each other, from any thread.

    base_fingerprint: of `base`, whose arrays do not change; tensors without changes are those of `base`. The caller
    compares the fingerprint of the result with that of the version. Raises CheckpointError if a patch is damaged or
    belongs to other weights.
    """
    patched = dict(base)
    for content in patches:
        try:
            patch = msgspec.msgpack.decode(content, type=WeightPatch)
        except (msgspec.MsgspecError, ValueError) as error:
            raise CheckpointError(f"the weight patch cannot be read: {visible(str(error), 200)}") from error
        if patch.base != base_fingerprint:
            raise CheckpointError(
                f"the weight patch belongs to the weights {visible(patch.base, 40)!r}, not {base_fingerprint!r}"
            )
        _apply(patch, patched)
        base_fingerprint = patch.target
    return patched


def _apply(patch: WeightPatch, weights: dict[str, StoredTensor]) -> None:
    """Replace the tensors that a patch changes."""
    for tensor in patch.tensors:
        old = weights.get(tensor.name)
        if old is None or old.dtype not in CODES or (tensor.dtype, tensor.shape) != (old.dtype, tuple(old.shape)):
            known = "does not exist" if old is None else f"is {old.dtype} {tuple(old.shape)}"
            raise _damaged(tensor, f"it {known}, not {visible(tensor.dtype, 40)} {tensor.shape}")
        weights[tensor.name] = StoredTensor(old.dtype, old.shape, _patched(tensor, old))


def _item_bytes(tensor: StoredTensor) -> int:
    return CODES[tensor.dtype][1]


def _bits(tensor: StoredTensor) -> Bits:
    """Return the bits of the elements as unsigned integers."""
    bits: Bits = tensor.data.view(f"u{_item_bytes(tensor)}")
    return bits


def _tensor_patch(name: str, base: StoredTensor, target: StoredTensor, positions: np.ndarray[Any, Any]) -> TensorPatch:
    gaps = np.diff(positions, prepend=-1) - 1
    gap_bytes = (int(gaps.max()).bit_length() + 7) // 8
    bits = 8 * _item_bytes(target)
    difference = (_bits(target)[positions] - _bits(base)[positions]).view(f"i{bits // 8}")
    zigzag = (difference << 1) ^ (difference >> (bits - 1))
    return TensorPatch(
        name=name,
        dtype=target.dtype,
        shape=tuple(target.shape),
        changed=positions.size,
        gap_bytes=gap_bytes,
        gaps=_planes(gaps, gap_bytes),
        differences=_planes(zigzag, bits // 8),
    )


def _patched(patch: TensorPatch, base: StoredTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a tensor after the patch."""
    bits, old = 8 * _item_bytes(base), _bits(base)
    if patch.changed > old.size:
        raise _damaged(patch, f"{patch.changed} of {old.size} elements are changed")
    gaps = _numbers(patch, patch.gaps, patch.gap_bytes, np.dtype(np.int64))
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= old.size:
        raise _damaged(patch, f"position {positions[-1]} is outside its {old.size} elements")
    zigzag = _numbers(patch, patch.differences, bits // 8, old.dtype)
    difference = (zigzag >> 1) ^ (~(zigzag & 1) + 1)
    new = old.copy()
    new[positions] += difference
    return new.view(np.uint8)


def _planes(numbers: np.ndarray[Any, Any], count: int) -> bytes:
    """Compress the lowest `count` bytes of each number, the lowest bytes first."""
    item = numbers.dtype.itemsize
    little = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
    return zlib.compress(little.view(np.uint8).reshape(-1, item)[:, :count].T.tobytes(), COMPRESSION)


def _numbers(patch: TensorPatch, planes: bytes, count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the numbers of `_planes`. The memory that damaged data can take is bounded by the size of the tensor."""
    expected, decoder = patch.changed * count, zlib.decompressobj()
    try:
        content = decoder.decompress(planes, expected) if expected else b""
        is_whole = len(content) == expected and (not expected or _ends(decoder))
    except zlib.error as error:
        raise _damaged(patch, str(error)) from error
    if not is_whole:
        raise _damaged(patch, f"its changes do not have {expected} bytes")
    little = np.zeros((patch.changed, dtype.itemsize), np.uint8)
    little[:, :count] = np.frombuffer(content, np.uint8).reshape(count, patch.changed).T
    return little.view(dtype.newbyteorder("<"))[:, 0].astype(dtype)


def _ends(decoder: zlib._Decompress) -> bool:
    """Return whether the stream has no further content and its checksum is correct."""
    return not decoder.decompress(decoder.unconsumed_tail, 1) and decoder.eof


def _damaged(patch: TensorPatch, reason: str) -> CheckpointError:
    return CheckpointError(f"the weight patch cannot be applied to {visible(patch.name, 100)}: {reason}")
