"""Writes a model directory layer by layer, so that its weights are never in memory together."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np

from attachments.files.gguf_tokenizer import gguf_tokenizer
from attachments.files.merging import MergedLayer
from clotho.storage.atomic_files import FileDigest, write_file
from clotho.storage.tensors import CODES, StoredTensor, as_stored

SHARD_BYTES = 4 * 2**30
"""Largest size of a file of weights, except for a tensor that is larger."""

COPIED = re.compile(
    r"(tokenizer|vocab|merges|added_tokens|special_tokens|chat_template|generation_config|spiece)[^/]*|.*\.(model|tiktoken|jinja)"
)
"""Names of the files of a tokenizer, and of the settings of generation."""


class TensorShape(NamedTuple):
    """Type and shape of a tensor that is written later."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * CODES[self.dtype][1]


def write_streamed(
    path: Path, shapes: Mapping[str, TensorShape], tensors: Iterable[StoredTensor], metadata: Mapping[str, str]
) -> FileDigest:
    """Write a new safetensors file whose tensors are produced one after another, in the order of `shapes`.

    The library writes tensors that are in memory together only. Raises OSError if the disk refuses.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, shape in shapes.items():
        header[name] = {
            "dtype": CODES[shape.dtype][0],
            "shape": shape.shape,
            "data_offsets": (place, place + shape.bytes),
        }
        place += shape.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = (memoryview(tensor.data) for tensor in tensors)  # type: ignore[arg-type]
    return write_file(path, chain([struct.pack("<Q", len(text)), text], data))


def write_weights(directory: Path, layers: list[MergedLayer], metadata: Mapping[str, str]) -> list[list[float]]:
    """Write the weights in files of limited size, with an index if there are several; return the changes of layers.

    layers: becomes empty, so that each layer leaves the memory when it is written.
    """
    shards = list(_shards(layers))
    weight_map: dict[str, str] = {}
    changes: list[list[float]] = []
    total = sum(tensor.bytes for shard in shards for layer in shard for tensor in _shapes(layer).values())
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shapes = {tensor: shape for layer in shard for tensor, shape in _shapes(layer).items()}
        weight_map |= dict.fromkeys(shapes, name)
        layers[: len(shard)] = []
        write_streamed(directory / name, shapes, _evaluated(shard, changes), metadata)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(directory / "model.safetensors.index.json", [_json(index)])
    return changes


def _shards(layers: list[MergedLayer]) -> Iterator[list[MergedLayer]]:
    shard: list[MergedLayer] = []
    size = 0
    for layer in layers:
        own = sum(shape.bytes for shape in _shapes(layer).values())
        if shard and size + own > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(layer)
        size += own
    yield shard


def _shapes(layer: MergedLayer) -> dict[str, TensorShape]:
    return {name: TensorShape(str(a.dtype).removeprefix("mlx.core."), a.shape) for name, a in layer.arrays.items()}


def _evaluated(shard: list[MergedLayer], changes: list[list[float]]) -> Iterator[StoredTensor]:
    """Evaluate layer by layer and forget each one. changes: receives the changes of layers with an adapter."""
    while shard:
        layer = shard.pop(0)
        arrays = list(layer.arrays.values())
        if layer.change is None:
            mx.eval(arrays)
        else:
            mx.eval(arrays, layer.change)
            changes.append([float(value) for value in np.array(layer.change)])
        layer.arrays.clear()
        del layer
        while arrays:
            yield as_stored(arrays.pop(0))
        mx.clear_cache()


def common_dtype(layers: list[MergedLayer]) -> str:
    """Return the floating type of most weights."""
    sizes: Counter[str] = Counter()
    for layer in layers:
        for array in layer.arrays.values():
            if mx.issubdtype(array.dtype, mx.floating):
                sizes[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return sizes.most_common(1)[0][0]


def write_beside(directory: Path, base: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration, and copy the tokenizer of the base model."""
    write_file(directory / "config.json", [_json(dict(sorted(config.items())))])
    if base.is_file():
        gguf_tokenizer(base).save_pretrained(str(directory))
        return
    for path in sorted(base.iterdir()):
        if COPIED.fullmatch(path.name) and path.suffix != ".py" and path.is_file():
            shutil.copyfile(path, directory / path.name)


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
