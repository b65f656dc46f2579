"""Lossless sparse patches between two versions of the weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from attachments.remote.weight_patch import WeightPatch, apply_patches, make_patch
from clotho.storage.tensors import StoredTensor, as_array, as_stored
from protocols.errors import CheckpointError

Weights = dict[str, StoredTensor]

FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}


def random_weights(seed: int, dtype: str = "bfloat16", size: int = 600) -> Weights:
    """Return tensors of random bits: NaN, infinities and signed zeros are as likely as other values."""
    random = np.random.default_rng(seed)

    def tensor(*shape: int) -> StoredTensor:
        return StoredTensor(dtype, shape, random.integers(0, 256, int(np.prod(shape)) * FLOATS[dtype], np.uint8))

    return {"a": tensor(size // 4, 4), "b": tensor(size), "c": tensor(1)}


def changed(weights: Weights, seed: int, share: float = 0.02) -> Weights:
    """Return weights of which a share of the elements have other bits, by one unit or at random."""
    random = np.random.default_rng(seed)
    found = {}
    for name, (dtype, shape, data) in weights.items():
        bits: Any = data.copy().view(f"u{FLOATS[dtype]}")
        places = np.flatnonzero(random.random(bits.size) < share)
        steps = random.integers(0, 2 ** (8 * FLOATS[dtype]), places.size, dtype=np.uint64)
        steps = np.where(random.random(places.size) < 0.5, steps, 1).astype(bits.dtype)
        bits[places] += steps
        found[name] = StoredTensor(dtype, shape, bits.view(np.uint8))
    return found


def content(weights: Weights) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the weights as values that compare."""
    return {name: (dtype, tuple(shape), data.tobytes()) for name, (dtype, shape, data) in weights.items()}


def patch_of(base: Weights, target: Weights, *, before: str = "old", after: str = "new") -> bytes:
    """Return the patch, which must exist."""
    patch = make_patch(base, target, base_fingerprint=before, fingerprint=after)
    assert patch is not None
    return patch


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_patch_restores_every_bit(dtype: str) -> None:
    """For random bits and random changes, few or many."""
    for seed in range(30):
        base = random_weights(seed, dtype, size=2000)
        target = changed(base, seed, share=(0.0, 0.001, 0.02, 0.2)[seed % 4])
        before = content(base)
        patch = patch_of(base, target)
        assert content(apply_patches([patch], base, base_fingerprint="old")) == content(target)
        assert content(base) == before


def test_positions_at_both_ends_and_far_apart_are_restored() -> None:
    """Gaps of one, two and three bytes."""
    zeros = {"a": StoredTensor("bfloat16", (200_000,), np.zeros(400_000, np.uint8))}
    bits = np.zeros(200_000, np.uint16)
    bits[[0, 1, 300, 70_000, 199_999]] = (1, 0x8000, 0xFFFF, 7, 2)
    target = {"a": StoredTensor("bfloat16", (200_000,), bits.view(np.uint8))}
    patch = patch_of(zeros, target)
    assert len(patch) < 400
    assert content(apply_patches([patch], zeros, base_fingerprint="old")) == content(target)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_arrays_keep_every_bit(dtype: mx.Dtype) -> None:
    """From arrays of MLX to patched arrays of MLX, scalars and transposed arrays included."""
    base = {"w": mx.random.normal((64, 8)).astype(dtype).T, "s": mx.array(1.0).astype(dtype)}
    target = {"w": mx.where(mx.arange(64) == 5, -base["w"], base["w"]), "s": base["s"] + 1}
    mx.eval(base, target)
    stored = [{name: as_stored(array) for name, array in arrays.items()} for arrays in (base, target)]
    patched = apply_patches([patch_of(*stored)], stored[0], base_fingerprint="old")
    for name, array in target.items():
        found = as_array(patched[name])
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert mx.array_equal(found, array).item()


def test_patches_that_follow_each_other_lead_to_the_newest_weights() -> None:
    """Each patch belongs to the weights that the one before makes."""
    first = random_weights(1)
    second = changed(first, 2)
    third = changed(second, 3)
    patches = [patch_of(first, second, before="1", after="2"), patch_of(second, third, before="2", after="3")]
    assert content(apply_patches(patches, first, base_fingerprint="1")) == content(third)
    with pytest.raises(CheckpointError, match="belongs to"):
        apply_patches(patches[::-1], first, base_fingerprint="1")


def test_small_moves_of_few_weights_take_a_small_part_of_the_file() -> None:
    """One percent of the weights moves by one unit in the last place: less than one percent of the bytes."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**16, 400_000, np.uint16)
    moved = bits.copy()
    moved[random.random(bits.size) < 0.01] += 1
    base, target = ({"w": StoredTensor("bfloat16", bits.shape, one.view(np.uint8))} for one in (bits, moved))
    assert len(patch_of(base, target)) < 0.01 * bits.nbytes


def test_no_patch_is_made_if_it_would_not_be_smaller() -> None:
    """Most elements have changed, or the tensors are other ones."""
    base = random_weights(0)
    names = {"base_fingerprint": "old", "fingerprint": "new"}
    assert make_patch(base, changed(base, 1, share=0.9), **names) is None
    assert make_patch(base, {name: base[name] for name in "ab"}, **names) is None
    assert make_patch(base, random_weights(0, "float16"), **names) is None
    assert make_patch(base, base | {"a": base["a"]._replace(shape=(600,))}, **names) is None
    tiny = {"c": StoredTensor("float32", (3,), np.zeros(12, np.uint8))}
    assert make_patch(tiny, {"c": StoredTensor("float32", (3,), np.eye(1, 12, dtype=np.uint8)[0])}, **names) is None


def tensor_patch(**changes: Any) -> bytes:
    """Return a patch of one tensor of `random_weights`, with other fields."""
    base = random_weights(0)
    patch = msgspec.msgpack.decode(patch_of(base, changed(base, 1)), type=WeightPatch)
    tensor = next(one for one in patch.tensors if one.name == "b")
    return msgspec.msgpack.encode(msgspec.structs.replace(patch, tensors=(msgspec.structs.replace(tensor, **changes),)))


def compressed(*numbers: int, item: str = "u2") -> bytes:
    """Return numbers as planes."""
    planes = np.array(numbers, f"<{item}").view(np.uint8).reshape(len(numbers), -1).T
    return zlib.compress(planes.tobytes())


HOSTILE: dict[str, Callable[[], bytes]] = {
    "no patch": lambda: b"safetensors",
    "empty": lambda: b"",
    "truncated": lambda: tensor_patch()[:-3],
    "other tensor": lambda: tensor_patch(name="model.other"),
    "other type": lambda: tensor_patch(dtype="float16"),
    "unknown type": lambda: tensor_patch(dtype="complex64"),
    "other shape": lambda: tensor_patch(shape=(300, 2)),
    "more changes than elements": lambda: tensor_patch(changed=601),
    "no changes": lambda: tensor_patch(changed=0),
    "fewer changes than positions": lambda: tensor_patch(changed=1),
    "position after the end": lambda: tensor_patch(
        changed=2, gap_bytes=2, gaps=compressed(599, 0), differences=compressed(1, 2)
    ),
    "largest gaps": lambda: tensor_patch(
        changed=3, gap_bytes=4, gaps=compressed(*[2**32 - 1] * 3, item="u4"), differences=compressed(1, 2, 3)
    ),
    "gaps too wide": lambda: tensor_patch(gap_bytes=8),
    "gaps that are no stream": lambda: tensor_patch(gaps=b"\0\0"),
    "gaps that end early": lambda: tensor_patch(gaps=zlib.compress(b"\1" * 100)[:-6]),
    "gaps without a checksum": lambda: tensor_patch(changed=1, gap_bytes=1, gaps=zlib.compress(b"\1")[:-4]),
    "huge stream": lambda: tensor_patch(gaps=zlib.compress(bytes(5_000_000), 1)),
    "differences that end early": lambda: tensor_patch(differences=zlib.compress(b"\1\2")),
    "differences of another length": lambda: tensor_patch(differences=zlib.compress(bytes(5000))),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_patch_is_refused_and_changes_nothing(kind: str) -> None:
    """Positions out of range, wrong lengths, types and tensors; the size of the tensor bounds the memory."""
    base = random_weights(0)
    before = content(base)
    with pytest.raises(CheckpointError):
        apply_patches([HOSTILE[kind]()], base, base_fingerprint="old")
    assert content(base) == before


def test_a_valid_patch_of_one_tensor_is_accepted() -> None:
    """The damaged patches above are refused for their damage."""
    assert apply_patches([tensor_patch()], random_weights(0), base_fingerprint="old").keys() == {"a", "b", "c"}
    gaps = {"changed": 2, "gap_bytes": 2, "gaps": compressed(0, 598), "differences": compressed(1, 2)}
    patched = apply_patches([tensor_patch(**gaps)], random_weights(0), base_fingerprint="old")
    assert content(patched) != content(random_weights(0))


def test_a_patch_for_other_weights_is_refused() -> None:
    """The fingerprint of the weights that the worker has decides."""
    base = random_weights(0)
    with pytest.raises(CheckpointError, match="belongs to"):
        apply_patches([patch_of(base, changed(base, 1))], base, base_fingerprint="other")
