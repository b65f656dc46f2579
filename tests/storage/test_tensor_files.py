"""Arrays on disk: every bit comes back, and damage is noticed."""

from __future__ import annotations

import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from clotho.storage.atomic_files import write_file
from clotho.storage.tensors import DTYPE_NAMES, named_arrays, read_tensors, tensor_chunks
from protocols.errors import CheckpointError


def save(path: Path, arrays: dict[str, mx.array]) -> Path:
    """Write arrays as a checkpoint does."""
    write_file(path, tensor_chunks(arrays))
    return path


def bits(array: mx.array) -> bytes:
    """The array's bytes, whatever its type."""
    return bytes(memoryview(array))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_floats_come_back_bit_for_bit(tmp_path: Path, dtype: mx.Dtype) -> None:
    """Subnormals, infinities, signed zeros and NaN included."""
    special = mx.array([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 1e-7, 3.0]).astype(dtype)
    random = mx.random.normal((33, 7)).astype(dtype)
    mx.eval(special, random)
    found = read_tensors(save(tmp_path / "t.safetensors", {"special": special, "random": random}))
    assert found["random"].dtype == dtype
    assert bits(found["special"]) == bits(special)
    assert bits(found["random"]) == bits(random)


def test_every_type_scalars_and_transposed_arrays_come_back(tmp_path: Path) -> None:
    """Optimizer state holds scalars of unsigned integers; a transposed view is written in row order."""
    arrays = {str(index): mx.array(3).astype(dtype) for index, dtype in enumerate(DTYPE_NAMES)}
    arrays["transposed"] = mx.arange(6).reshape(2, 3).T
    arrays["empty"] = mx.zeros((0, 4))
    mx.eval(arrays)
    found = read_tensors(save(tmp_path / "t.safetensors", arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert mx.array_equal(found[name], array).item()


def test_other_readers_understand_the_files(tmp_path: Path) -> None:
    """The safetensors library reads the same values: the format is its own, not ours."""
    numpy_reader = pytest.importorskip("safetensors.numpy")
    array = mx.random.normal((5, 3))
    mx.eval(array)
    found = numpy_reader.load_file(save(tmp_path / "t.safetensors", {"a": array, "b": mx.array(7)}))
    assert np.array_equal(found["a"], np.array(array))


def test_equal_arrays_give_equal_files(tmp_path: Path) -> None:
    """Byte-identical adapters of equal runs need it; the order of the dictionary does not matter."""
    one = {"a": mx.ones((2,)), "b": mx.zeros((3,), dtype=mx.float16)}
    mx.eval(one)
    first = save(tmp_path / "1.safetensors", one).read_bytes()
    second = save(tmp_path / "2.safetensors", dict(reversed(one.items()))).read_bytes()
    assert first == second


def test_evaluated_arrays_are_written_from_any_thread(tmp_path: Path) -> None:
    """A worker thread writes what the compute thread computed, without computing anything itself."""
    array = mx.random.normal((64, 64))
    mx.eval(array)
    thread = threading.Thread(target=save, args=(tmp_path / "t.safetensors", {"a": array}))
    thread.start()
    thread.join()
    assert mx.array_equal(read_tensors(tmp_path / "t.safetensors")["a"], array).item()


def test_trees_are_written_under_dotted_names() -> None:
    """Nested or already flat, the names are the same."""
    tree = {"model": {"layers": [{}, {"w": mx.ones((1,))}]}, "step": mx.array(1)}
    assert list(named_arrays(tree)) == ["model.layers.1.w", "step"]
    assert list(named_arrays(named_arrays(tree))) == ["model.layers.1.w", "step"]


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    """Truncated, garbage, absent, or of a format that can carry code: one error, nothing read."""
    path = save(tmp_path / "t.safetensors", {"a": mx.ones((100,))})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensors(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="nothing else is read"):
        read_tensors(tmp_path / "adapters.npz")
