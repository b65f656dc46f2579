"""Adapters of every format, read from a path: one structure, in the layout of mlx-lm, with the bits of the file.

The library reads the adapters of mlx-lm, which a run writes. The table of adapter formats has what reads the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct, field

from clotho.extension import absence, adapter_formats, provided
from clotho.models.adapter_base import Base, open_base_model, recorded_base
from clotho.models.adapter_formats import (
    CONFIG,
    DTYPES,
    GGUF,
    MATRIX_AXES,
    MLX,
    NPZ,
    PEFT,
    AdapterFormat,
    Config,
    FormatName,
    MlxLmConfig,
    Target,
    is_named,
    stacked_module,
)
from clotho.models.adapters import (
    AdapterSource,
    Floats,
    format_of,
    opened_tensors,
    read_config,
    validated,
)
from clotho.settings.server import AdaptersSection
from protocols.checkpoint import BaseQuantization
from protocols.errors import ArtifactError, visible

UNLIMITED = AdaptersSection(max_bytes=2**50, max_rank=2**20)
"""Limits of an adapter that the user chose, not a client."""

TEXT_MODEL = re.compile(r"model\.layers\.\d+\..+|lm_head|model\.embed_tokens")
"""Names of layers that are the same in mlx-lm and Hugging Face."""


class Adapter(Struct, frozen=True, kw_only=True, eq=False):
    """An adapter. Dictionaries without `arrays` and `dtypes` are by module.

    arrays: `MODULE.lora_a`, `MODULE.lora_b`, and with DoRA `MODULE.m`, in mlx-lm's layout as float32.
    dtypes: type in the file of each array; the conversion of the values to it is exact. ranks: without padding.
    targets: the layers. base: the base model if it is on this machine. base_name: its name. base_quantization: how a
    run quantized the base model at load. weights: by parameter, the weights that replace those of the base model.
    """

    path: Path
    format: FormatName
    arrays: dict[str, Floats]
    dtypes: dict[str, str]
    scales: dict[str, float]
    ranks: dict[str, int]
    targets: Mapping[str, Target]
    is_dora: bool
    dropout: float
    base_name: str
    base_quantization: BaseQuantization | None = None
    base: Base | None = field(default=None)
    weights: dict[str, Floats] = field(default_factory=dict)

    def changes(self, module: str) -> bool:
        """Whether a layer has a weight of its own, or matrices."""
        return module in self.ranks or f"{module}.weight" in self.weights

    @property
    def bytes(self) -> int:
        """Size of the tensors in the file."""
        return sum(array.size * DTYPES[self.dtypes[name]] for name, array in self.arrays.items())


ReadAdapter = Callable[[Path, Base | None], Adapter]
"""Reads an adapter of one format. The base model is that of `read_adapter_of`, None if none was named.

Raises ArtifactError, AdapterRequestError or ModelError.
"""


def read_adapter_of(path: Path, model: str = "") -> Adapter:
    """Read an adapter of any format.

    path: a directory of mlx-lm or PEFT, a directory with `adapter.npz`, such a file, a GGUF file, or the directory of a
    run or checkpoint. model: the base model, as in `model.path`; without it, the base model that the adapter names is
    used if it is on this machine. Raises ArtifactError, AdapterRequestError or ModelError.
    """
    base = open_base_model(model) if model else None
    name = _format_of(path)
    if name == MLX.name:
        return _read_mlx(path, base)
    place = adapter_formats().get(name)
    if place is None:
        raise ArtifactError(f"{path}: the format {name} {absence(name)}", reason="unreadable")
    read: ReadAdapter = provided(place)
    return read(path, base)


def _format_of(path: Path) -> FormatName:
    """Return the format of the adapter at a path. Raises ArtifactError or AdapterRequestError if there is none."""
    if path.suffix == ".gguf":
        return GGUF.name
    directory = adapter_directory(path)
    config = read_config(directory)
    return NPZ.name if path.suffix == ".npz" or _has_npz_only(directory, config) else format_of(config).name


def _read_mlx(path: Path, base: Base | None) -> Adapter:
    directory = adapter_directory(path)
    config = read_config(directory)
    base = base or recorded_base(config.base, directory, *directory.parents[:3])
    with opened_tensors(directory / MLX.tensors, UNLIMITED.max_bytes) as file:
        return adapter_from(file, MLX, config, base, path=path)


def adapter_directory(path: Path) -> Path:
    """Return the directory with the configuration. Raises ArtifactError if there is none."""
    for place in (path, path / "adapters", path.parent if path.suffix in (".npz", ".safetensors") else path):
        if (place / CONFIG).is_file():
            return place
    what = f"has no {CONFIG}" if path.exists() else "does not exist"
    raise ArtifactError(f"{path} {what}: it is no adapter of mlx-lm, PEFT, NPZ or GGUF", reason="unreadable")


def _has_npz_only(directory: Path, config: Config) -> bool:
    is_safe = (directory / format_of(config).tensors).exists()
    return isinstance(config, MlxLmConfig) and not is_safe and (directory / NPZ.tensors).exists()


def adapter_from(
    source: AdapterSource, form: AdapterFormat, config: Config, base: Base | None, *, path: Path
) -> Adapter:
    """Validate the tensors of a file; return the adapter without the padding of ranks, which Clotho's files record.

    base: the base model; without it, the layers are those that the shapes in the file state. path: what the user named.
    """
    targets = base.targets if base else stated_targets(source, form)
    contents = validated(source, form, config, targets, UNLIMITED)
    own = config.ranks if isinstance(config, MlxLmConfig) else {}
    arrays, ranks = dict(contents.arrays), dict(contents.ranks)
    for module, rank in contents.ranks.items():
        keys = [key for key in own if is_named(module, key)]
        smaller = own[max(keys, key=len)] if keys else rank
        if smaller < rank:
            ranks[module] = smaller
            for matrix in ("lora_a", "lora_b"):
                name = f"{module}.{matrix}"
                axis = MATRIX_AXES[matrix, arrays[name].ndim]
                kept, padding = np.split(arrays[name], [smaller], axis=axis)
                if padding.any():
                    raise ArtifactError(f"{path}: {name} has a larger rank than {smaller}", reason="unreadable")
                arrays[name] = np.ascontiguousarray(kept)
    return Adapter(
        path=path,
        format=form.name,
        arrays=arrays,
        dtypes=contents.dtypes,
        scales=contents.scales,
        ranks=ranks,
        targets={module: targets[module] for module in ranks},
        is_dora=config.is_dora,
        dropout=config.dropout,
        base_name=config.base,
        base_quantization=config.base_quantization if isinstance(config, MlxLmConfig) else None,
        base=base,
    )


def stated_targets(source: AdapterSource, form: AdapterFormat) -> dict[str, Target]:
    """Return the layers whose adapters a file contains, by the names of mlx-lm.

    Raises ArtifactError for names that mlx-lm and Hugging Face do not share, which only a base model can translate.
    """
    sides: dict[str, dict[str, int]] = {}
    for name, header in source.headers.items():
        found = form.parse(name)
        if found is None or found.matrix == "m" or len(header.shape) not in (2, 3):
            continue
        module, expert = stacked_module(found.module) if form is PEFT else (found.module, None)
        if form is PEFT and not TEXT_MODEL.fullmatch(module):
            raise ArtifactError(
                f"{source.path}: mlx-lm and Hugging Face can name {visible(module, 100)} differently; "
                "name the base model: --model MODEL",
                reason="base",
            )
        side = sides.setdefault(module, {"inputs": 0, "outputs": 0, "experts": 0})
        shape = header.shape
        if len(shape) == 3 or form.transposed or expert is not None:
            shape = shape[::-1]  # (inputs, rank, ...) for A, (rank, outputs, ...) for B
        if found.matrix == "lora_a":
            side["inputs"] = shape[0]
        else:
            side["outputs"] = shape[1]
        side["experts"] = shape[2] if len(shape) == 3 else max(side["experts"], 0 if expert is None else expert + 1)
    return {module: Target(**side, embedding=is_embedding(module)) for module, side in sides.items()}


def is_embedding(module: str) -> bool:
    """Whether a module has the name of an embedding."""
    name = module.rpartition(".")[2]
    return "emb" in name or name == "wte"
