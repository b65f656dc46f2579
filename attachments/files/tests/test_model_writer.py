"""Weights that are written one after another."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from attachments.files.merging import TensorShape, write_streamed
from clotho.storage.tensors import CODES, as_stored


def test_a_streamed_file_has_every_type(tmp_path: Path) -> None:
    """MLX and safetensors read the values of the tensors, whatever types stand before them."""
    arrays = {name: mx.arange(3 + i).astype(getattr(mx, name)) for i, name in enumerate(CODES)}
    mx.eval(arrays)
    shapes = {name: TensorShape(name, array.shape) for name, array in arrays.items()}
    write_streamed(tmp_path / "t.safetensors", shapes, map(as_stored, arrays.values()), {})
    found = mx.load(str(tmp_path / "t.safetensors"))
    assert isinstance(found, dict)
    assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in arrays.items()
    }
