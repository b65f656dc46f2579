"""Models known by their configuration alone."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from clotho.config.schema import ModelSection
from clotho.models.loading import SHAPES, open_base, open_shape, shipped_shape
from clotho.models.parameters import flat
from tests.saved_models import UNTIED, save


def arrays(model: nn.Module) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    """Shapes and types by name."""
    return {name: (tuple(array.shape), array.dtype) for name, array in flat(model.parameters()).items()}


@pytest.mark.parametrize("section", [{"dtype": "bfloat16"}, {"dtype": "float32", "dequantize": True}])
@pytest.mark.parametrize("bits", [0, 4])
def test_a_configuration_gives_the_shapes_and_types_of_the_files(
    tmp_path: Path, bits: int, section: dict[str, object]
) -> None:
    """Packed or not, converted or not: only the values are missing."""
    model = ModelSection(path=str(tmp_path), **section)  # type: ignore[arg-type]
    save(tmp_path, UNTIED | {"torch_dtype": "bfloat16"}, bits=bits, dtype=mx.bfloat16)
    expected, _ = open_base(tmp_path, model)
    found, config = open_shape(tmp_path, model)
    assert arrays(found) == arrays(expected)
    assert config["vocab_size"] == UNTIED["vocab_size"]


@pytest.mark.parametrize("directory", sorted(SHAPES.iterdir()), ids=lambda path: path.name)
def test_every_shipped_configuration_builds_a_model_by_the_name_of_its_repository(directory: Path) -> None:
    """OWNER--NAME stands for OWNER/NAME, and the file for a model that mlx-lm knows."""
    repository = directory.name.replace("--", "/")
    assert shipped_shape(repository) == directory
    model, config = open_shape(directory, ModelSection(path=repository))
    assert len(model.layers) == config["num_hidden_layers"]


def test_other_repositories_have_no_shape() -> None:
    """Neither an unknown name nor a bare directory of the project is one."""
    assert shipped_shape("organisation/name") is None
    assert shipped_shape("") is None
