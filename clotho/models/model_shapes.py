"""Models whose configuration ships with the project: their shape is known where their weights are not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import load_model

from clotho.config.schema import ModelSection
from clotho.models.loading import DTYPES, convert

SHAPES = Path(__file__).parents[2] / "profiles" / "shapes"
"""`OWNER--NAME/config.json` for a repository OWNER/NAME of the hub, as the repository itself has it."""


def shipped_shape(repository: str) -> Path | None:
    """Directory with the configuration of a repository of the hub, if it ships with the project."""
    directory = SHAPES / repository.replace("/", "--")
    return directory if (directory / "config.json").is_file() else None


def open_shape(directory: Path, section: ModelSection) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a configuration, converted as `section` asks; return it with the configuration.

    As `model_loading.open_base` builds one from files: all shapes and types are final. Its weights would be random, and
    are never to be evaluated: until then they take no memory, whatever the size of the model.
    """
    model, config = load_model(directory, lazy=True, strict=False)
    model.set_dtype(DTYPES[config["torch_dtype"]])
    if packing := config.get("quantization"):
        nn.quantize(model, group_size=packing["group_size"], bits=packing["bits"])
    convert(model, section)
    return model, config
