"""Tensors in safetensors files."""

from __future__ import annotations

import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from clotho.storage.tensors import (
    named_arrays,
    read_tensors,
    write_tensors,
)
from protocols.errors import CheckpointError

DTYPES = (
    mx.float32, mx.float16, mx.bfloat16, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32,
    mx.uint64, mx.bool_, mx.complex64,
)  # fmt: skip


def save(path: Path, arrays: dict[str, mx.array]) -> Path:
    """Write arrays to a new file."""
    write_tensors(path, arrays)
    return path


def bits(array: mx.array) -> bytes:
    """Return the bytes of an array of any dtype."""
    return bytes(memoryview(array))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_floats_keep_every_bit(tmp_path: Path, dtype: mx.Dtype) -> None:
    """Also subnormals, infinities, signed zeros and NaN."""
    special = mx.array([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 1e-7, 3.0]).astype(dtype)
    random = mx.random.normal((33, 7)).astype(dtype)
    mx.eval(special, random)
    found = read_tensors(save(tmp_path / "t.safetensors", {"special": special, "random": random}))
    assert found["random"].dtype == dtype
    assert bits(found["special"]) == bits(special)
    assert bits(found["random"]) == bits(random)


def test_every_dtype_and_scalars_and_transposed_arrays_are_read_back(tmp_path: Path) -> None:
    """Optimizer state contains unsigned scalars; a transposed view is written in row-major order."""
    arrays = {str(index): mx.array(3).astype(dtype) for index, dtype in enumerate(DTYPES)}
    arrays["transposed"] = mx.arange(6).reshape(2, 3).T
    arrays["empty"] = mx.zeros((0, 4))
    mx.eval(arrays)
    found = read_tensors(save(tmp_path / "t.safetensors", arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert mx.array_equal(found[name], array).item()


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    """The reader of the library returns equal values."""
    array = mx.random.normal((5, 3))
    mx.eval(array)
    found = load_file(save(tmp_path / "t.safetensors", {"a": array, "b": mx.array(7)}))
    assert np.array_equal(found["a"], np.array(array))


def test_equal_arrays_give_equal_files(tmp_path: Path) -> None:
    """The order of the dictionary does not matter."""
    one = {"a": mx.ones((2,)), "b": mx.zeros((3,), dtype=mx.float16)}
    mx.eval(one)
    first = save(tmp_path / "1.safetensors", one).read_bytes()
    second = save(tmp_path / "2.safetensors", dict(reversed(one.items()))).read_bytes()
    assert first == second


def test_evaluated_arrays_are_written_from_any_thread(tmp_path: Path) -> None:
    """A worker thread writes arrays of the compute thread."""
    array = mx.random.normal((64, 64))
    mx.eval(array)
    thread = threading.Thread(target=save, args=(tmp_path / "t.safetensors", {"a": array}))
    thread.start()
    thread.join()
    assert mx.array_equal(read_tensors(tmp_path / "t.safetensors")["a"], array).item()


def test_arrays_are_read_at_once(tmp_path: Path) -> None:
    """What happens to the file afterwards changes them no more."""
    path = save(tmp_path / "t.safetensors", {"a": mx.arange(1000)})
    arrays = read_tensors(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert mx.array_equal(arrays["a"], mx.arange(1000)).item()


def test_trees_have_dotted_names() -> None:
    """Nested and flat trees have the same names."""
    tree = {"model": {"layers": [{}, {"w": mx.ones((1,))}]}, "step": mx.array(1)}
    assert list(named_arrays(tree)) == ["model.layers.1.w", "step"]
    assert list(named_arrays(named_arrays(tree))) == ["model.layers.1.w", "step"]


def test_damaged_files_and_other_formats_are_refused(tmp_path: Path) -> None:
    """Truncated, garbage, missing, or of a format that may contain code."""
    path = save(tmp_path / "t.safetensors", {"a": mx.ones((100,))})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="other formats are not supported"):
        read_tensors(tmp_path / "adapters.npz")


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    """The same mode as any other new file."""
    other = tmp_path / "other"
    other.touch()
    assert save(tmp_path / "t.safetensors", {"a": mx.ones((1,))}).stat().st_mode == other.stat().st_mode


def test_a_failed_write_raises_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage code handles errors of the library like errors of the disk."""

    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("clotho.storage.tensors.serialize_file", fail)
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path / "t.safetensors", {"a": mx.ones((1,))})
