"""The files of a model directory: checks before any library reads them, and fingerprints.

A model directory is foreign: files can be pipes, devices or endless, and `config.json` can state sizes that no file
contains. The checks bound memory and time: sizes of files, sizes in the configuration, and the headers of the weights.
Every failure is a `ModelError` with a message of one line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import stat
import struct
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from mlx_lm.utils import _get_classes
from msgspec import Struct

from protocols.errors import ModelError, visible

MAX_CONFIG_BYTES = 4 * 2**20
MAX_JSON_BYTES = 128 * 2**20
"""Size of a tokenizer or of an index of weights; the largest in use have about 35 MB."""

MAX_HEADER_BYTES = 100 * 2**20
"""Size of the header of a safetensors file, as in the library safetensors."""

MAX_COUNT = 10_000
"""Largest number of layers, heads or experts in a configuration."""

MAX_SIZE = 2**26
"""Largest width, rank or vocabulary in a configuration."""

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
COUNT_KEY = re.compile(r"(^|_)(layers?|heads|experts|blocks)$|^(num|n)_(?!position|tokens)")
SIZE_KEY = re.compile(r"(^d|_size|_dim|_rank|_model|_width)$|^(d|dim|hidden|intermediate)_")
LAYER_INDEX = re.compile(r"\.(\d{1,8})\.")

GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}


MALFORMED = (OSError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError, struct.error)
"""What a header that is not one raises."""


class TensorHeader(Struct, frozen=True, kw_only=True):
    """A tensor of a safetensors file. begin, bytes: position and size of its data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    bytes: int


def one_line(error: BaseException) -> str:
    """Return the message of an exception on one line of at most 300 characters; without one, the name of its class."""
    return visible(" ".join(str(error).split()), 300) or type(error).__name__


def require_file(path: Path, limit: int | None = None) -> None:
    """Raise ModelError unless `path` is a regular file, or a link to one, of at most `limit` bytes."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise ModelError(f"{path} cannot be read: {reason}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is not a regular file")
    if limit is not None and status.st_size > limit:
        raise ModelError(f"{path} has {status.st_size} bytes; at most {limit} are permitted")


def require_tokenizer_files(directory: Path) -> None:
    """Check type and size of all files that a tokenizer can be read from."""
    for path in _entries(directory):
        if path.suffix in (".json", ".jinja", ".model", ".tiktoken", ".txt", ".jsonl", ".py"):
            require_file(path, MAX_CONFIG_BYTES if path.name.endswith("config.json") else MAX_JSON_BYTES)


def read_config(directory: Path) -> dict[str, Any]:
    """Read `config.json`. Raises ModelError if it is not an object with a `model_type`."""
    path = directory / "config.json"
    require_file(path, MAX_CONFIG_BYTES)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    except RecursionError as error:
        raise ModelError(f"{path} cannot be read: it is nested too deeply") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} has no model_type")
    return config


def read_object(path: Path) -> dict[str, Any]:
    """Read a small file with a JSON object. Raises ModelError."""
    require_file(path, MAX_CONFIG_BYTES)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {one_line(error)}") from error


def check_model(directory: Path, config: Mapping[str, Any]) -> None:
    """Check configuration, architecture and headers of weights, which are not read. Raises ModelError."""
    path = directory / "config.json"
    require_tokenizer_files(directory)
    require_bounded_sizes(config, path)
    _require_types(config, path)
    tensors = read_model_headers(directory)
    if tensors:
        _require_layers(config, tensors, path)
        _require_quantization(config, tensors, path)


def _entries(directory: Path) -> Iterator[Path]:
    try:
        yield from sorted(directory.iterdir())
    except OSError as error:
        raise ModelError(f"{directory} cannot be read: {error.strerror or error}") from error


def require_bounded_sizes(config: Mapping[str, Any], path: Path) -> None:
    """Refuse sizes that would take long to build: layers are built one by one."""
    for key, value in config.items():
        if isinstance(value, dict):
            require_bounded_sizes(value, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            limit = MAX_COUNT if COUNT_KEY.search(key) else MAX_SIZE if SIZE_KEY.search(key) else 2**53
            if not -limit <= value <= limit:
                raise ModelError(f"{path}: {visible(key, 60)} is {visible(str(value), 40)}, not at most {limit}")


def _require_types(config: Mapping[str, Any], path: Path) -> None:
    """Compare simple values with the types that the architecture declares in mlx-lm; null is always accepted."""
    try:
        _, arguments = _get_classes(dict(config))
        declared = typing.get_type_hints(arguments) if dataclasses.is_dataclass(arguments) else {}
    except Exception as error:  # unknown architectures, and annotations that cannot be resolved
        if isinstance(error, ValueError):
            raise ModelError(f"{path}: {one_line(error)}") from error
        return
    for key, kind in declared.items():
        value = config.get(key)
        expected = _mismatch(value, kind)
        if expected:
            raise ModelError(f"{path}: {key} is {visible(repr(value), 40)}, not {expected}")
    theta = config.get("rope_theta")
    if isinstance(theta, int | float) and not theta > 0:
        raise ModelError(f"{path}: rope_theta is {theta}, not a positive number")


def _mismatch(value: Any, kind: Any) -> str:
    """Return what `value` must be, or an empty text if it has the declared type."""
    kinds = set(typing.get_args(kind)) if typing.get_origin(kind) in (typing.Union, types.UnionType) else {kind}
    kinds.discard(type(None))
    if value is None or not kinds <= {int, float, bool, str}:
        return ""
    if bool in kinds and isinstance(value, bool):
        return ""
    if kinds & {int, float, bool} and isinstance(value, int | float):
        return "" if kinds & {int, float} and math.isfinite(value) else "true or false" if kinds == {bool} else "finite"
    if str in kinds and isinstance(value, str):
        return ""
    return "true or false" if kinds == {bool} else "text" if kinds == {str} else "a number"


def read_model_headers(directory: Path) -> dict[str, TensorHeader]:
    """Return the tensors of all weight files of a model directory, by name. Raises ModelError."""
    tensors: dict[str, TensorHeader] = {}
    for path in _entries(directory):
        if path.match("model*.safetensors"):
            tensors |= read_tensor_headers(path)
    return tensors


def read_tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a safetensors file, by name. Raises ModelError."""
    require_file(path)
    try:
        with path.open("rb") as file:
            return read_header(file, path.stat().st_size, MAX_HEADER_BYTES)[0]
    except (OSError, ModelError) as error:
        raise ModelError(f"{path} is no valid safetensors file: {one_line(error)}") from error


def read_header(file: BinaryIO, size: int, limit: int) -> tuple[dict[str, TensorHeader], int]:
    """Read the header of a safetensors file of `size` bytes; return the tensors by name, and where their data begins.

    limit: maximum size of the header. Raises ModelError if the header is invalid.
    """
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(limit, size - 8):
            raise ValueError(f"its header states a length of {length} bytes")
        entries = json.loads(file.read(length))
        if not isinstance(entries, dict):
            raise TypeError("its header is not an object")
        tensors, data = {}, size - 8 - length
        for name, entry in entries.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= data:
                    raise ValueError(f"the data of {name} is outside the file")
                shape = tuple(map(int, entry["shape"]))
                tensors[name] = TensorHeader(dtype=str(entry["dtype"]), shape=shape, begin=begin, bytes=end - begin)
        _require_disjoint(tensors)
    except MALFORMED as error:
        raise ModelError(one_line(error)) from error
    return tensors, 8 + length


def _require_disjoint(tensors: Mapping[str, TensorHeader]) -> None:
    """Raise ValueError if two tensors share bytes of the file."""
    ordered = sorted((one.begin, one.begin + one.bytes, name) for name, one in tensors.items())
    for (_, end, name), (begin, _, following) in pairwise(ordered):
        if begin < end:
            raise ValueError(f"the data of {following} overlap those of {name}")


def _require_layers(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], path: Path) -> None:
    indices = [int(found.group(1)) for name in tensors if (found := LAYER_INDEX.search(name))]
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in LAYER_KEYS:
            stated = section.get(key)
            if indices and isinstance(stated, int) and stated > max(indices) + 1:
                stored = f"the weights have {max(indices) + 1} layers"
                raise ModelError(f"the model cannot be loaded: {path}: {key} is {stated}, and {stored}")


def _require_quantization(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], path: Path) -> None:
    """Refuse a quantization that MLX does not know, or that the weights do not have."""
    stated = config.get("quantization")
    if stated is None:
        return
    if not isinstance(stated, dict):
        raise ModelError(f"{path}: quantization is not an object")
    for entry in (stated, *(value for value in stated.values() if isinstance(value, dict))):
        mode = entry.get("mode", "affine")
        if mode not in GROUP_SIZES:
            raise ModelError(
                f"{path}: quantization.mode is {visible(repr(mode), 40)}, not one of {', '.join(GROUP_SIZES)}"
            )
        for key, allowed in (("bits", BITS[mode]), ("group_size", GROUP_SIZES[mode])):
            if entry.get(key, None if entry is stated else allowed[0]) not in allowed:
                found = visible(repr(entry.get(key)), 40)
                raise ModelError(f"{path}: quantization.{key} is {found}, not one of {', '.join(map(str, allowed))}")
    if not any(name.endswith(".scales") for name in tensors):
        raise ModelError(f"{path}: quantization is set, and no weight is quantized (no tensor is named *.scales)")


SAMPLE_BYTES = 65_536

GGUF_HEADER_BYTES = 32 * 2**20
"""Larger than the header of any model in use: vocabulary and merges have at most about 15 MB."""

WEIGHT_FILES = ("*.safetensors", "config.json")

TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


def model_fingerprint(model: Path) -> str:
    """Return a fingerprint of configuration and weights, of large files from size, beginning and end."""
    if not model.is_dir():
        return _fingerprint([model], with_names=False)
    return _fingerprint(_matching(model, WEIGHT_FILES))


def tokenizer_fingerprint(model: Path, chat_template: str = "") -> str:
    """Return a fingerprint of vocabulary, merges and chat template of a directory.

    For a GGUF file, which begins with them, it is a fingerprint of its first bytes. chat_template: file of a template
    that replaces the model's.
    """
    replaced = [Path(chat_template).expanduser()] if chat_template else []
    if model.is_dir():
        return _fingerprint([*_matching(model, TOKENIZER_FILES), *replaced], whole=True)
    with model.open("rb") as file:
        header = hashlib.sha256(file.read(GGUF_HEADER_BYTES)).hexdigest()[:16]
    return f"{header}-{_fingerprint(replaced, whole=True)}" if replaced else header


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def _fingerprint(paths: Iterable[Path], *, whole: bool = False, with_names: bool = True) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name if with_names else ''} {size}\n".encode())
        with path.open("rb") as file:
            if whole or size <= 2 * SAMPLE_BYTES:
                digest.update(file.read())
                continue
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(size - SAMPLE_BYTES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
