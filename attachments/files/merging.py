"""The weights of a model with an adapter merged into them, as arrays that are evaluated layer by layer.

With LoRA the merged weight is W + scale (A B)^T, with DoRA m / |W + scale (A B)^T| per row times that sum
(arXiv:2402.09353). The arithmetic is float32, also for quantized weights; the result is then cast, or quantized. A
model directory is written layer by layer too, so that its weights are never in memory together.
"""

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
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from msgspec import Struct

from attachments.files.gguf_tokenizer import gguf_tokenizer
from clotho.models.loading import DTYPES
from clotho.models.parameters import Arrays, flat
from clotho.storage.atomic_files import FileDigest, write_file
from clotho.storage.tensors import CODES, StoredTensor, as_stored
from protocols.errors import ArtifactError
from training_run.adapters.contents import Adapter
from training_run.adapters.formats import MIXTRAL_LAYERS

ModelFormat = Literal["mlx", "hf", "gguf"]


class Packing(NamedTuple):
    """How weights are quantized."""

    bits: int
    group_size: int
    mode: str = "affine"


class MergeSettings(Struct, frozen=True, kw_only=True):
    """How merged weights are stored.

    dequantize: expand quantized weights. quantize: quantize all layers; None: keep the quantization of the base model.
    dtype: type of floating weights; `auto`: that of the base model, or of the scales of quantized weights.
    """

    format: ModelFormat = "mlx"
    dequantize: bool = False
    quantize: Packing | None = None
    dtype: str = "auto"

    @property
    def expands(self) -> bool:
        """Whether quantized weights of the base model are expanded, to be stored as they are or quantized anew."""
        return self.dequantize or self.quantize is not None


class MergedLayer(NamedTuple):
    """Arrays of a layer that are evaluated together.

    arrays: by name, not evaluated. change: for a layer with an adapter, the sums of squares of the change, of the
    stored change, of their difference, and the number of weights, (4,); None for other layers.
    """

    arrays: Arrays
    change: mx.array | None


class Weights(NamedTuple):
    """The weights of a base model, not evaluated. arguments: those of mlx-lm's model.

    arrays, packings: arrays by key, and the quantization, of every layer.
    """

    arguments: Any
    arrays: dict[str, Arrays]
    packings: dict[str, Packing | None]


def weights_of(model: nn.Module) -> Weights:
    """Return the weights of a model layer by layer."""
    by_module: dict[str, Arrays] = {}
    for name, array in flat(model.parameters()).items():
        module, _, key = name.rpartition(".")
        by_module.setdefault(module, {})[key] = array
    packings = {name: packing_of(module) for name, module in model.named_modules()}
    return Weights(getattr(model, "args", None), by_module, packings)


def merged_layers(model: nn.Module, adapter: Adapter, settings: MergeSettings) -> list[MergedLayer]:
    """Return all layers of the merged model, by the names of the format; nothing is evaluated.

    model: the base model with the types of its files, not evaluated. It must not be used afterwards.
    """
    _, by_module, packings = weights_of(model)
    chosen: Mapping[str, Packing | None] = packings
    if settings.dequantize or settings.quantize:
        chosen = dict(new_packings(model, settings.quantize))
    return [
        _merged(name, arrays, packings[name], chosen.get(name), adapter, settings) for name, arrays in by_module.items()
    ]


def _merged(
    name: str, own: Arrays, stored: Packing | None, packed: Packing | None, adapter: Adapter, settings: MergeSettings
) -> MergedLayer:
    """Return a layer. stored, packed: its quantization in the base model and in the merged model."""
    arrays, change = dict(own), None
    if (bias := adapter.weights.get(f"{name}.bias")) is not None:
        arrays["bias"] = mx.array(bias).astype(own["bias"].dtype)
    if adapter.changes(name) or packed != stored:
        before = full_weight(own, stored)
        after = with_adapter(before, adapter, name)
        for key in ("weight", "scales", "biases"):
            arrays.pop(key, None)
        dtype = stored_dtype(own, stored, settings)
        old = own if packed == stored else {}
        arrays |= _packed(after, packed, dtype, old) if packed else {"weight": after.astype(dtype)}
        if adapter.changes(name):
            wanted, kept = after - before, full_weight(arrays, packed) - before
            parts = (wanted.square().sum(), kept.square().sum(), (kept - wanted).square().sum())
            change = mx.stack([*parts, mx.array(wanted.size, mx.float32)])
    if settings.dtype != "auto":
        dtype = DTYPES[settings.dtype]
        arrays = {key: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a for key, a in arrays.items()}
    prefix = f"{name}." if name else ""
    named = {f"{prefix}{key}": array for key, array in arrays.items()}
    return MergedLayer(_separate_experts(name, named) if settings.format == "hf" else named, change)


def packing_of(module: nn.Module) -> Packing | None:
    """Return the quantization of a layer; None if its weights are not quantized."""
    if "scales" not in module:
        return None
    return Packing(int(module.bits), int(module.group_size), str(getattr(module, "mode", "affine")))


def new_packings(model: nn.Module, quantize: Packing | None) -> dict[str, Packing]:
    """Return the quantization of every layer that `quantize` applies to; the architecture can choose another one."""
    if quantize is None:
        return {}
    choose = getattr(model, "quant_predicate", None) or (lambda *_: True)
    found = {}
    for name, module in model.named_modules():
        stored = packing_of(module)
        if "weight" not in module or (stored is None and not hasattr(module, "to_quantized")):
            continue
        chosen = choose(name, module)
        own = quantize._replace(**chosen) if isinstance(chosen, dict) else quantize
        width = module.scales.shape[-1] * stored.group_size if stored else module.weight.shape[-1]
        if chosen and width % own.group_size == 0:
            found[name] = own
    return found


def full_weight(arrays: Mapping[str, mx.array], packing: Packing | None) -> mx.array:
    """Return the weights of a layer as float32."""
    if packing is None:
        return arrays["weight"].astype(mx.float32)
    scales, biases = arrays["scales"], arrays.get("biases")
    if mx.issubdtype(scales.dtype, mx.floating):
        scales = scales.astype(mx.float32)
    return mx.dequantize(
        arrays["weight"],
        scales,
        None if biases is None else biases.astype(mx.float32),
        group_size=packing.group_size,
        bits=packing.bits,
        mode=packing.mode,
        dtype=mx.float32,
    )


def with_adapter(weight: mx.array, adapter: Adapter, name: str) -> mx.array:
    """Return a float32 weight as an adapter changes it: replaced, or with matrices. Axes of experts come first."""
    if (own := adapter.weights.get(f"{name}.weight")) is not None:
        weight = mx.array(own)
    if name not in adapter.ranks:
        return weight
    a, b = (mx.array(adapter.arrays[f"{name}.{matrix}"]) for matrix in ("lora_a", "lora_b"))
    scale = adapter.scales[name]
    target = adapter.targets[name]
    if target.experts:
        merged = weight + scale * (b @ a)
    elif target.embedding:
        merged = weight + scale * (a @ b)
    else:
        merged = weight + scale * (b.T @ a.T)
    if not adapter.has_magnitudes:
        return merged
    magnitude = mx.array(adapter.arrays[f"{name}.m"])
    return (magnitude / mx.linalg.norm(merged, axis=1))[:, None] * merged


def _packed(weight: mx.array, packing: Packing, dtype: mx.Dtype, old: Arrays) -> Arrays:
    """Return a float32 weight quantized, with the scale and bias of every group of weights that have the least error.

    old: the arrays of the layer in the base model, if that has the same quantization; otherwise none. A group is
    rounded to three grids: that of `mx.quantize`, that of the base model, and the least-squares fit to the codes of the
    latter. A small change moves the grid of `mx.quantize`, and every weight with it. The grid of the base model
    represents all weights that do not change without an error.
    """
    names = ("weight", "scales", "biases")
    parts = mx.quantize(weight, packing.group_size, packing.bits, packing.mode)
    cast = [part.astype(dtype) if part.dtype == mx.float32 else part for part in parts]
    best = dict(zip(names, cast, strict=False))
    if "biases" not in old or packing.mode != "affine":
        return best
    kept = _on_grid(weight, old["scales"].astype(dtype), old["biases"].astype(dtype), packing)
    for candidate in (kept, _refitted(weight, kept, packing, dtype)):
        is_better = _group_errors(weight, candidate, packing) < _group_errors(weight, best, packing)
        words = packing.group_size * packing.bits // 32
        repeated = {"weight": mx.repeat(is_better, words, axis=-1), "scales": is_better, "biases": is_better}
        best = {name: mx.where(repeated[name], candidate[name], best[name]) for name in names}
    return best


def _on_grid(weight: mx.array, scales: mx.array, biases: mx.array, packing: Packing) -> Arrays:
    """Return a weight whose groups are rounded to the nearest points of given grids."""
    scale, bias = scales.astype(mx.float32)[..., None], biases.astype(mx.float32)[..., None]
    position = (_groups(weight, packing) - bias) / mx.where(scale == 0, 1.0, scale)
    codes = mx.clip(mx.round(position), 0, 2**packing.bits - 1).astype(mx.uint32)
    return {"weight": _pack(codes.reshape(weight.shape), packing.bits), "scales": scales, "biases": biases}


def _refitted(weight: mx.array, rounded: Arrays, packing: Packing, dtype: mx.Dtype) -> Arrays:
    """Return a weight on the grids that fit the codes of `rounded` with the least squared error."""
    unit = mx.ones_like(rounded["scales"])
    codes = {"weight": rounded["weight"], "scales": unit, "biases": mx.zeros_like(unit)}
    code, value = _groups(full_weight(codes, packing), packing), _groups(weight, packing)
    code_mean, value_mean = code.mean(axis=-1, keepdims=True), value.mean(axis=-1, keepdims=True)
    variance = (code - code_mean).square().sum(axis=-1, keepdims=True)
    slope = ((code - code_mean) * (value - value_mean)).sum(axis=-1, keepdims=True) / mx.maximum(variance, 1e-12)
    offset = value_mean - slope * code_mean
    return _on_grid(weight, slope.squeeze(-1).astype(dtype), offset.squeeze(-1).astype(dtype), packing)


def _group_errors(weight: mx.array, stored: Arrays, packing: Packing) -> mx.array:
    """Return the sum of squared rounding errors of every group."""
    return _groups(full_weight(stored, packing) - weight, packing).square().sum(axis=-1)


def _groups(weight: mx.array, packing: Packing) -> mx.array:
    """Return the weights with an axis for groups and an axis for the weights of a group."""
    return weight.reshape(*weight.shape[:-1], -1, packing.group_size)


def _pack(codes: mx.array, bits: int) -> mx.array:
    """Return codes as MLX stores them: 32 codes of `bits` bits are a stream of `bits` words, lowest bits first."""
    code_32 = codes.reshape(*codes.shape[:-1], -1, 32)
    words = [mx.zeros(code_32.shape[:-1], mx.uint32) for _ in range(bits)]
    for number in range(32):
        word, shift = divmod(number * bits, 32)
        words[word] = words[word] | (code_32[..., number] << shift)
        if shift + bits > 32:
            words[word + 1] = words[word + 1] | (code_32[..., number] >> (32 - shift))
    return mx.stack(words, axis=-1).reshape(*codes.shape[:-1], -1)


def stored_dtype(own: Arrays, stored: Packing | None, settings: MergeSettings) -> mx.Dtype:
    """Return the type of floating weights of a layer. stored: its quantization in the base model."""
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    found = own["weight" if stored is None else "scales"].dtype
    return found if mx.issubdtype(found, mx.floating) else mx.bfloat16


def _separate_experts(module: str, arrays: Arrays) -> Arrays:
    """Return arrays by the names of Hugging Face, with the experts of a mixture one by one."""
    if expert_layer(module, "") == module:
        return arrays
    found: Arrays = {}
    for name, array in arrays.items():
        key = name.rpartition(".")[2]
        found |= {f"{expert_layer(module, f'.{number}')}.{key}": array[number] for number in range(array.shape[0])}
    return found


def require_layers(model: nn.Module, adapter: Adapter, path: str) -> None:
    """Raise ArtifactError if the model lacks a layer of the adapter."""
    lacking = sorted(adapter.ranks.keys() - dict(model.named_modules()).keys())
    if lacking:
        raise ArtifactError(f"{path} has no layer {lacking[0]}, which the adapter changes", reason="base")


class Change(Struct, frozen=True, kw_only=True):
    """What storing has left of the change of all adapted layers.

    relative_error: size of the rounding error relative to the change. rms, rounding_rms: root mean squares.
    layers, lost: number of adapted layers, and of those whose rounding error is at least as large as their change.
    """

    layers: int
    lost: int
    relative_error: float
    rms: float
    rounding_rms: float


def summarize(changes: Iterator[list[float]] | list[list[float]]) -> Change:
    """Return the sum over layers. changes: see `MergedLayer`."""
    rows = list(changes)
    wanted, _, error, weights = (sum(row[index] for row in rows) for index in range(4))
    return Change(
        layers=len(rows),
        lost=sum(row[2] >= row[0] > 0 for row in rows),
        relative_error=(error / wanted) ** 0.5 if wanted else 0.0,
        rms=(wanted / weights) ** 0.5,
        rounding_rms=(error / weights) ** 0.5,
    )


def merged_config(
    config: Mapping[str, Any], settings: MergeSettings, packings: Mapping[str, Packing], dtype: str
) -> dict[str, Any]:
    """Return the configuration of the merged model.

    packings: see `new_packings`. dtype: the most common floating type of the weights.
    """
    merged = dict(config)
    if settings.dequantize or settings.quantize:
        merged.pop("quantization", None)
        merged.pop("quantization_config", None)
    if settings.quantize:
        others = {name: packing._asdict() for name, packing in packings.items() if packing != settings.quantize}
        merged["quantization"] = {**settings.quantize._asdict(), **others}
        merged["quantization_config"] = merged["quantization"]
    for key in ("torch_dtype", "dtype"):
        if key in merged:
            merged[key] = dtype
    return merged


STACKED_NAME = re.compile(r"(?P<before>.+)\.switch_mlp\.(?P<layer>\w+)")
MIXTRAL_BLOCK = "block_sparse_moe"
"""Part of the name of a mixture with Mixtral's names."""


def expert_layer(module: str, expert: str) -> str:
    """Return the Hugging Face name of the layer of an expert, the inverse of `stacked_module`.

    expert: the number of the expert as a path, such as `.3`. A module that is no mixture keeps its name.
    """
    if (found := STACKED_NAME.fullmatch(module)) is None:
        return module
    theirs = {ours: name for name, ours in MIXTRAL_LAYERS.items()} if found["before"].endswith(MIXTRAL_BLOCK) else {}
    return f"{found['before']}.experts{expert}.{theirs.get(found['layer'], found['layer'])}"


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
