"""Adapters of every format, read from a path: one structure, in the layout of mlx-lm, with the bits of the file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from attachments.files.base import Base, open_base_model, recorded_base
from attachments.files.gguf import half_rotation
from attachments.files.gguf_header import BF16, F16, F32, GgufHeader
from attachments.files.gguf_header import read_header as read_gguf_header
from attachments.files.gguf_names import ARCHITECTURES, gguf_names, heads_key
from clotho.models.adapter_formats import (
    CONFIG,
    DTYPES,
    GGUF,
    MATRIX_AXES,
    NPZ,
    PEFT,
    WEIGHTS,
    AdapterFormat,
    Config,
    FormatName,
    MlxLmConfig,
    PeftConfig,
    Target,
    is_named,
    stacked_module,
)
from clotho.models.adapters import (
    AdapterContents,
    AdapterSource,
    Floats,
    as_float32,
    format_of,
    opened_tensors,
    read_config,
    validated,
)
from clotho.models.loading import open_stored
from clotho.models.model_files import TensorHeader, one_line
from clotho.models.parameters import flat
from clotho.settings.model import ModelSection
from clotho.settings.server import AdaptersSection
from protocols.checkpoint import BaseQuantization
from protocols.errors import ArtifactError, visible

UNLIMITED = AdaptersSection(max_bytes=2**50, max_rank=2**20)
"""Limits of an adapter that the user chose, not a client."""

MAX_SHOWN = 5
"""Number of weights that a message names."""

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
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


def read_adapter_of(path: Path, model: str = "") -> Adapter:
    """Read an adapter of any format.

    path: a directory of mlx-lm or PEFT, a directory with `adapter.npz`, such a file, a GGUF file, or the directory of a
    run or checkpoint. model: the base model, as in `model.path`; without it, the base model that the adapter names is
    used if it is on this machine. Raises ArtifactError, AdapterRequestError or ModelError.
    """
    base = open_base_model(model) if model else None
    if path.suffix == ".gguf":
        return _read_gguf(path, base)
    directory = _directory(path)
    config = read_config(directory)
    form = NPZ if path.suffix == ".npz" or _has_npz_only(directory, config) else format_of(config)
    base = base or recorded_base(config.base, directory, *directory.parents[:3])
    opened = _opened_npz(directory / NPZ.tensors) if form is NPZ else opened_tensors(directory / form.tensors, 2**50)
    with opened as file:
        matrices, stored = _divided(file) if form is PEFT else (file, {})
        targets = _targets(matrices, form, base)
        contents = validated(matrices, form, config, targets, UNLIMITED)
        weights = replaced_weights(file, stored, base) if stored else {}
    for name in (config.modules_to_save or ()) if isinstance(config, PeftConfig) else ():
        if not any(is_named(parameter.rpartition(".")[0], name) for parameter in stored):
            raise ArtifactError(
                f"{directory}: modules_to_save names {visible(name, 100)}, and the file has no weights of it",
                reason="unreadable",
            )
    found = _adapter(path, form, contents, config, base, targets)
    if form is PEFT:
        _require_head(found)
    return replace(found, weights=weights)


def _divided(source: AdapterSource) -> tuple[AdapterSource, dict[str, str]]:
    """Return a file of PEFT without weights in full, and the name in the file of each parameter with such a weight."""
    weights = {
        name: f"{found['module']}.{found['key']}"
        for name in source.headers
        if PEFT.parse(name) is None and (found := WEIGHTS.fullmatch(name))
    }
    matrices = {name: header for name, header in source.headers.items() if name not in weights}
    return AdapterSource(source.path, matrices, source.read), {ours: name for name, ours in weights.items()}


def replaced_weights(source: AdapterSource, stored: Mapping[str, str], base: Base | None) -> dict[str, Floats]:
    """Return the weights of a PEFT file that differ from those of the base model, by the names of mlx-lm.

    PEFT stores `modules_to_save`, and copies of embeddings and heads that have an adapter. Raises ArtifactError for
    weights that the base model lacks, quantizes or shares between embeddings and head.
    """
    shown = ", ".join(visible(name, 100) for name in sorted(stored)[:MAX_SHOWN])
    if base is None:
        raise ArtifactError(
            f"{source.path} has weights in full, which only a comparison with the base model explains: {shown}; name "
            "it: --model MODEL",
            reason="base",
        )
    if base.architecture not in ARCHITECTURES:
        raise ArtifactError(
            f"{source.path}: weights in full ({shown}) of {visible(base.architecture, 60)}, which mlx-lm and Hugging "
            "Face name differently, are not supported",
            reason="inexpressible",
        )
    model, _ = open_stored(base.files, ModelSection(path=base.path))
    own = flat(model.parameters())
    found: dict[str, Floats] = {}
    for name, tensor in stored.items():
        is_shared = "lm_head" not in base.targets and name in (HEAD, EMBEDDINGS)
        expected = own.get(EMBEDDINGS if is_shared else name)
        if expected is None or not mx.issubdtype(expected.dtype, mx.floating):
            what = "is not a layer of the base model" if expected is None else "is quantized in the base model"
            raise ArtifactError(f"{source.path}: {visible(name, 100)} {what}", reason="inexpressible")
        header = source.headers[tensor]
        fits = header.shape == expected.shape and header.bytes == expected.size * DTYPES.get(header.dtype, 0)
        values = source.read(tensor) if fits else None
        if values is None or not np.isfinite(values).all():
            raise ArtifactError(
                f"{source.path}: {visible(tensor, 100)} is not finite, or has not the shape {expected.shape} of the "
                "base model",
                reason="base",
            )
        if np.array_equal(values, np.array(expected.astype(mx.float32))):
            continue
        if is_shared:
            raise ArtifactError(
                f"{source.path}: {visible(name, 100)} was trained in full; in PEFT, embeddings and head are then two "
                "weights, and in the base model they are one",
                reason="inexpressible",
            )
        found[name] = values
    return found


def _require_head(adapter: Adapter) -> None:
    """Refuse matrices of embeddings that are also the head: mlx-lm adapts both, PEFT the embeddings only."""
    adapted = [module for module, target in adapter.targets.items() if target.embedding]
    if adapted and adapter.is_dora:
        raise ArtifactError(
            f"{adapter.path}: {adapted[0]}: DoRA of embeddings is not supported", reason="inexpressible"
        )
    if adapted and (adapter.base is None or "lm_head" not in adapter.base.targets):
        why = "name the base model: --model MODEL" if adapter.base is None else "this base model shares them"
        raise ArtifactError(
            f"{adapter.path}: PEFT does not adapt a head that shares the weights of {adapted[0]}, mlx-lm does; {why}",
            reason="inexpressible" if adapter.base else "base",
        )


def _directory(path: Path) -> Path:
    """Return the directory with the configuration. Raises ArtifactError if there is none."""
    for place in (path, path / "adapters", path.parent if path.suffix in (".npz", ".safetensors") else path):
        if (place / CONFIG).is_file():
            return place
    what = f"has no {CONFIG}" if path.exists() else "does not exist"
    raise ArtifactError(f"{path} {what}: it is no adapter of mlx-lm, PEFT, NPZ or GGUF", reason="unreadable")


def _has_npz_only(directory: Path, config: Config) -> bool:
    is_safe = (directory / format_of(config).tensors).exists()
    return isinstance(config, MlxLmConfig) and not is_safe and (directory / NPZ.tensors).exists()


def _adapter(
    path: Path,
    form: AdapterFormat,
    contents: AdapterContents,
    config: Config,
    base: Base | None,
    targets: Mapping[str, Target],
) -> Adapter:
    """Return the adapter without the padding of ranks, which Clotho's configuration records."""
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


def _targets(source: AdapterSource, form: AdapterFormat, base: Base | None) -> Mapping[str, Target]:
    """Return the layers of the base model; without it, the layers that the shapes in the file state."""
    return base.targets if base else stated_targets(source, form)


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


@contextmanager
def _opened_npz(path: Path) -> Iterator[AdapterSource]:
    """Read an NPZ file; objects, which can contain code, are refused. Raises ArtifactError."""
    kinds = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
    except Exception as error:  # of the ZIP archive, its compression, the header of an array, or the memory for it
        raise ArtifactError(f"{path} is no valid NPZ file: {one_line(error)}", reason="unreadable") from error
    headers = {
        name: TensorHeader(dtype=kinds.get(a.dtype, str(a.dtype)), shape=a.shape, begin=0, bytes=a.nbytes)
        for name, a in arrays.items()
    }
    yield AdapterSource(path, headers, lambda name: np.ascontiguousarray(arrays[name], np.float32))


def _read_gguf(path: Path, base: Base | None) -> Adapter:
    """Read an adapter of llama.cpp. Raises ArtifactError or ModelError."""
    header = read_gguf_header(path)
    metadata = header.metadata
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != expected:
            shown = visible(repr(metadata.get(key)), 40)
            raise ArtifactError(f"{path}: {key} is {shown}, not {expected!r}", reason="unreadable")
    alpha = metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or alpha <= 0:
        raise ArtifactError(f"{path}: adapter.lora.alpha is {visible(repr(alpha), 40)}", reason="unreadable")
    name = metadata.get("general.base_model.0.name", "")
    base = base or recorded_base(name if isinstance(name, str) else "", *path.absolute().parents[:3])
    config = PeftConfig(
        peft_type="LORA", lora_alpha=float(str(np.float32(alpha))), base_model_name_or_path=name or None
    )
    source = _gguf_source(path, header, base)
    targets = _targets(source, GGUF, base)
    return _adapter(path, GGUF, validated(source, GGUF, config, targets, UNLIMITED), config, base, targets)


BLOCK_LAYERS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"{mlp}{name}_proj" for mlp in ("mlp.", "mlp.switch_mlp.", "block_sparse_moe.switch_mlp.")
      for name in ("gate", "up", "down")),
)  # fmt: skip
"""Layers of a block, by the names of mlx-lm. They translate the names of llama.cpp without a base model."""

GGUF_DTYPES = {F32: "F32", F16: "F16", BF16: "BF16"}


def _gguf_source(path: Path, header: GgufHeader, base: Base | None) -> AdapterSource:
    """Return the tensors by the names of mlx-lm; rows of queries and keys are reordered for mlx-lm when read."""
    stated = header.metadata.get("general.architecture")
    kinds = [kind for kind, known in ARCHITECTURES.items() if known.name == stated]
    if not kinds or (base is not None and base.architecture not in kinds):
        other = f" of a base model {base.architecture!r}" if base and kinds else ""
        shown = visible(repr(stated), 60)
        raise ArtifactError(f"{path}: adapters of {shown}{other} are not supported", reason="unreadable")
    architecture = ARCHITECTURES[kinds[0]]
    numbers = [int(part) for name in header.tensors for part in re.findall(r"^blk\.(\d{1,5})\.", name)]
    layers = base.layers if base else max(numbers, default=0) + 1
    blocks = [f"model.layers.{n}.{layer}" for n in range(layers) for layer in BLOCK_LAYERS]
    modules = base.targets if base else [*blocks, "lm_head"]
    ours = {theirs: module for module, theirs in gguf_names(modules, architecture, layers).items()}
    found: dict[str, tuple[str, TensorHeader, str | None]] = {}
    for name, info in header.tensors.items():
        weight, _, matrix = name.rpartition(".")
        module = ours.get(weight, weight)
        kind = GGUF_DTYPES.get(info.kind, f"type {info.kind}")
        size = int(np.prod(info.shape)) * DTYPES.get(kind, 0)
        entry = TensorHeader(dtype=kind, shape=info.shape, begin=info.start, bytes=size)
        heads = heads_key(module, architecture) if matrix == "lora_b" else None
        found[f"{module}.{matrix}"] = (name, entry, heads)

    def read(name: str) -> Floats | None:
        _, entry, heads = found[name]
        with path.open("rb") as file:
            file.seek(entry.begin)
            values = as_float32(file.read(entry.bytes), entry)
        if values is None or heads is None:
            return values
        if base is None:
            raise ArtifactError(
                f"{path}: the order of rows in {name} depends on the number of heads; name the base model: "
                "--model MODEL",
                reason="base",
            )
        return half_rotation(values, base.number(heads))

    return AdapterSource(path, {name: entry for name, (_, entry, _) in found.items()}, read)
