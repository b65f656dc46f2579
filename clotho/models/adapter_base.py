"""The base model of an adapter: its configuration and layers, from the headers of its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from clotho.models.adapter_formats import Target
from clotho.models.adapters import adapter_targets
from clotho.models.loading import find_model, is_local, open_base
from clotho.settings.model import ModelSection
from protocols.errors import ArtifactError, ModelError


class Base(Struct, frozen=True, kw_only=True):
    """A base model. path: a value of `model.path`. files: directory or GGUF file. targets: layers by name.

    config: the configuration in the form of config.json.
    """

    path: str
    files: Path
    config: Mapping[str, Any]
    targets: Mapping[str, Target]

    @property
    def architecture(self) -> str:
        """The `model_type` of the configuration."""
        return str(self.config["model_type"])

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return int(self.number("num_hidden_layers"))

    def number(self, key: str) -> int:
        """Return a number of the configuration. Raises ArtifactError if it has none."""
        value = self.config.get(key)
        if not isinstance(value, int):
            raise ArtifactError(f"the configuration of {self.path} has no {key}", reason="base")
        return value


def open_base_model(path: str) -> Base:
    """Read the configuration and the shapes of a base model; weights are not evaluated. Raises ModelError."""
    files = find_model(path)
    model, config = open_base(files, ModelSection(path=path), read_weights=False)
    return Base(path=path, files=files, config=config, targets=adapter_targets(model, embeddings=True))


def recorded_base(name: str, *beside: Path) -> Base | None:
    """Return the base model that an adapter names, if it is on this machine; models of the hub are not downloaded.

    beside: directories that a relative path can start from, besides the working directory.
    """
    places = [name, *(str(place / name) for place in beside)] if name and not os.path.isabs(name) else [name]
    for place in places:
        if not place or not is_local(place):
            continue
        try:
            return open_base_model(place)
        except ModelError:
            continue
    return None
