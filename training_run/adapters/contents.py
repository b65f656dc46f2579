"""An adapter in memory, the layers that can have one, and the base model that it changes.

Adapters of all formats become float32 arrays in the layout of mlx-lm.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from clotho.models.experts import EXPERT_LINEAR
from clotho.models.loading import find_model, is_local, open_base
from clotho.models.lora import LINEAR, AdaptedModule, widths
from clotho.settings.model import ModelSection
from protocols.checkpoint import AdapterKind, BaseQuantization
from protocols.errors import ArtifactError, ModelError
from training_run.adapters.formats import FormatName, Target, place_of

Floats = NDArray[np.float32]


def adapter_targets(
    model: nn.Module, adapted: tuple[AdaptedModule, ...] = (), *, embeddings: bool = False
) -> dict[str, Target]:
    """Return the linear layers of a model by name. adapted: modules that hold the policy's adapter over a layer.

    embeddings: whether to return the embeddings too.
    """
    bases = {module.name: module.base for module in adapted}
    inside = tuple(f"{name}." for name in bases)
    modules = {name: module for name, module in model.named_modules() if not name.startswith(inside)} | bases
    targets = {}
    for name, module in modules.items():
        if isinstance(module, LINEAR):
            inputs, outputs = widths(module)
            experts = module.num_experts if isinstance(module, EXPERT_LINEAR) else 0
            targets[name] = Target(inputs=inputs, outputs=outputs, experts=experts)
        elif embeddings and isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
            dims, tokens = widths(module)
            targets[name] = Target(inputs=tokens, outputs=dims, embedding=True)
    return targets


def reached_share(targets: Mapping[str, Target], adapted: Collection[str], experts_per_token: int) -> float:
    """Return the share of the weights that compute a token in the blocks whose layers have an adapter.

    These weights are those of all linear layers of the blocks; of a mixture, those of `experts_per_token` experts.
    targets: layers by name. adapted: names of the layers with an adapter.
    """
    active = {
        name: target.inputs * target.outputs * (min(experts_per_token, target.experts) if target.experts else 1)
        for name, target in targets.items()
        if place_of(name)[0] is not None
    }
    return sum(size for name, size in active.items() if name in adapted) / max(1, sum(active.values()))


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


class Adapter(Struct, frozen=True, kw_only=True, eq=False):
    """An adapter. Dictionaries without `arrays` and `dtypes` are by module.

    arrays: `MODULE.lora_a`, `MODULE.lora_b`, and with magnitudes `MODULE.m`, in mlx-lm's layout as float32.
    scales: absolute. ranks: without padding. path: what was read. dtypes: type in the file of each array; the
    conversion of the values to it is exact. targets: the layers. base: the base model if it is on this machine.
    base_name: its name. base_quantization: how a run quantized the base model at load. weights: by parameter, the
    weights that replace those of the base model.
    """

    arrays: dict[str, Floats]
    scales: dict[str, float]
    ranks: dict[str, int]
    path: Path
    format: FormatName = "mlx"
    method: AdapterKind = "lora"
    dropout: float = 0.0
    dtypes: dict[str, str] = field(default_factory=dict)
    targets: Mapping[str, Target] = field(default_factory=dict)
    base_name: str = ""
    base_quantization: BaseQuantization | None = None
    base: Base | None = None
    weights: dict[str, Floats] = field(default_factory=dict)

    def changes(self, module: str) -> bool:
        """Whether a layer has a weight of its own, or matrices."""
        return module in self.ranks or f"{module}.weight" in self.weights

    @property
    def has_magnitudes(self) -> bool:
        """Whether layers have magnitudes besides A and B."""
        return any(name.endswith(".m") for name in self.arrays)

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(self.ranks.values())

    @property
    def bytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())
