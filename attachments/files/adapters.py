"""Adapters in the formats of PEFT, NPZ and llama.cpp, read as `training_run.adapters.reading` reads those of mlx-lm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from attachments.files.gguf import half_rotation
from attachments.files.gguf_header import BF16, F16, F32, GgufHeader
from attachments.files.gguf_header import read_header as read_gguf_header
from attachments.files.gguf_names import ARCHITECTURES, gguf_names, heads_key
from clotho.models.loading import open_stored
from clotho.models.model_files import TensorHeader, one_line
from clotho.models.parameters import flat
from clotho.settings.model import ModelSection
from protocols.errors import ArtifactError, visible
from training_run.adapters.contents import Adapter, Base, Floats, recorded_base
from training_run.adapters.formats import DTYPES, GGUF, NPZ, PEFT, Config, PeftConfig, is_named
from training_run.adapters.reading import (
    AdapterSource,
    adapter_from,
    as_float32,
    listed,
    opened_directory,
    opened_tensors,
)

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

WEIGHTS = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:(?!\.lora_).)+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\."
    r"(?P<key>weight|bias)"
)
"""Weights in full in a file of PEFT: of `modules_to_save`, and copies of embeddings and heads that have an adapter."""


def read_peft(path: Path, base: Base | None) -> Adapter:
    """Read an adapter of PEFT. Raises ArtifactError, AdapterRequestError or ModelError."""
    directory, config, base = opened_directory(path, base)
    with opened_tensors(directory / PEFT.tensors) as file:
        matrices, stored = _divided(file)
        found = adapter_from(matrices, PEFT, config, base, path=path)
        weights = replaced_weights(file, stored, base) if stored else {}
    _require_saved(directory, config, stored)
    _require_head(found)
    return replace(found, weights=weights)


def read_npz(path: Path, base: Base | None) -> Adapter:
    """Read an adapter in an NPZ file. Raises ArtifactError, AdapterRequestError or ModelError."""
    directory, config, base = opened_directory(path, base)
    with _opened_npz(directory / NPZ.tensors) as file:
        found = adapter_from(file, NPZ, config, base, path=path)
    _require_saved(directory, config, {})
    return found


def _require_saved(directory: Path, config: Config, stored: Mapping[str, str]) -> None:
    """Refuse a file that lacks weights in full that its configuration names. stored: see `_divided`."""
    for name in (config.modules_to_save or ()) if isinstance(config, PeftConfig) else ():
        if not any(is_named(parameter.rpartition(".")[0], name) for parameter in stored):
            raise ArtifactError(
                f"{directory}: modules_to_save names {visible(name, 100)}, and the file has no weights of it",
                reason="unreadable",
            )


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
    shown = listed(sorted(stored))
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
    if adapted and adapter.has_magnitudes:
        raise ArtifactError(
            f"{adapter.path}: {adapted[0]}: magnitudes of embeddings are not supported", reason="inexpressible"
        )
    if adapted and (adapter.base is None or "lm_head" not in adapter.base.targets):
        why = "name the base model: --model MODEL" if adapter.base is None else "this base model shares them"
        raise ArtifactError(
            f"{adapter.path}: PEFT does not adapt a head that shares the weights of {adapted[0]}, mlx-lm does; {why}",
            reason="inexpressible" if adapter.base else "base",
        )


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


def read_gguf(path: Path, base: Base | None) -> Adapter:
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
    config = PeftConfig(peft_type="LORA", lora_alpha=float(str(np.float32(alpha))), base=name or None)
    source = _gguf_source(path, header, base)
    return adapter_from(source, GGUF, config, base, path=path)


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
        """Return a tensor in the order of rows of mlx-lm; None if its type cannot be read."""
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
