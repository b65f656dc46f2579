"""Adapter directories of mlx-lm and PEFT, validated before memory is allocated.

`clotho/models/adapter_formats.py` defines the formats. Adapters of all formats become float32 arrays in the layout of
mlx-lm. A directory is foreign: links are not followed, sizes and names are compared with the model from the header of
the file, and values must be finite. Everything is NumPy, so any thread can read an adapter.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from msgspec import Struct, field
from numpy.typing import NDArray

from clotho.models.adapter_formats import (
    CONFIG,
    DTYPES,
    MLX,
    PEFT,
    AdapterFormat,
    Config,
    Matrix,
    PeftConfig,
    Target,
    TensorName,
    invalid,
    parse_config,
    stacked_module,
)
from clotho.models.lora import AdaptedModule
from clotho.models.model_files import TensorHeader, one_line, read_header
from clotho.settings.server import AdaptersSection
from protocols.errors import AdapterRequestError, ModelError, visible

__all__ = ["AdapterContents", "Matrix", "Target", "adapter_targets", "as_arrays", "read_adapter"]

MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 16 * 2**20
MAX_SHOWN = 5
"""Number of tensors that an error message names."""

FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, and a pipe is not waited for."""

FLOAT32_BYTES = 4

MAX_CHANGE = 65_504.0
"""Largest change of a weight, the largest number in float16. The weights of models are below 100."""

Floats = NDArray[np.float32]


class AdapterContents(Struct, frozen=True, kw_only=True, eq=False):
    """The validated contents of an adapter.

    arrays: `MODULE.lora_a` and `MODULE.lora_b`, with DoRA also `MODULE.m`, in mlx-lm's layout. scales: the absolute
    scale of each module. rank: the largest rank. path: the directory. ranks: rank of each module in the file.
    dtypes: type of each array in the file. config: what the configuration states.
    """

    arrays: dict[str, Floats]
    scales: dict[str, float]
    rank: int
    path: str
    ranks: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    config: Config | None = None

    @property
    def bytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


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
        if isinstance(module, (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)):
            *experts, outputs, inputs = module.weight.shape
            if "scales" in module:
                inputs = inputs * 32 // module.bits
            targets[name] = Target(inputs=inputs, outputs=outputs, experts=experts[0] if experts else 0)
        elif embeddings and isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
            tokens, dims = module.weight.shape
            dims = dims * 32 // module.bits if "scales" in module else dims
            targets[name] = Target(inputs=tokens, outputs=dims, embedding=True)
    return targets


class _Tensor(NamedTuple):
    """Where a matrix of a module is in the file. expert: index of the expert that a PEFT matrix belongs to."""

    name: str
    module: str
    matrix: Matrix
    header: TensorHeader
    expert: int | None = None


class AdapterSource(NamedTuple):
    """The tensors of an adapter file. path: the file. read: returns a tensor as float32; None if it is truncated."""

    path: Path
    headers: Mapping[str, TensorHeader]
    read: Callable[[str], Floats | None]


def read_adapter(directory: Path, targets: Mapping[str, Target], limits: AdaptersSection) -> AdapterContents:
    """Read and validate an adapter directory with LoRA matrices, in any thread.

    targets: the layers of the model. Raises AdapterRequestError with reason `missing` if a file does not exist, and
    `invalid` for all other failures: an unknown format, DoRA, a full fine-tuning, weights beside the adapter, tensors
    that do not fit the model, a rank or a size above the limits, or values that are not finite.
    """
    config = read_config(directory)
    if isinstance(config, PeftConfig) and config.modules_to_save:
        raise invalid(f"{directory / CONFIG}: modules_to_save is set; weights beside the adapter cannot be served")
    if config.is_dora:
        key = "use_dora is true" if isinstance(config, PeftConfig) else "fine_tune_type is dora"
        raise invalid(f"{directory / CONFIG}: {key}; only LoRA can be served beside other adapters")
    form = format_of(config)
    with opened_tensors(directory / form.tensors, limits.max_bytes) as source:
        return validated(source, form, config, targets, limits)


def read_config(directory: Path) -> Config:
    """Read the configuration of an adapter directory. Raises AdapterRequestError."""
    path = directory / CONFIG
    with _opened(path, MAX_CONFIG_BYTES) as (file, _):
        return parse_config(file.read(), path)


def format_of(config: Config) -> AdapterFormat:
    """Return the format of a directory with a safetensors file."""
    return PEFT if isinstance(config, PeftConfig) else MLX


def validated(
    source: AdapterSource,
    form: AdapterFormat,
    config: Config,
    targets: Mapping[str, Target],
    limits: AdaptersSection,
) -> AdapterContents:
    """Compare the tensors of a file with the layers of the model, then read them. Raises AdapterRequestError."""
    tensors = _named(source, form, config, targets)
    ranks = _ranks(tensors, form, targets, limits, source.path)
    if config.is_dora and (lacking := [name for name in ranks if (name, "m") not in {t[1:3] for t in tensors}]):
        raise invalid(f"{source.path}: {_listed(lacking)}: the magnitudes of DoRA are missing")
    arrays = _read_arrays(source, tensors, ranks, targets, form)
    scales = {module: config.scale(module, rank) for module, rank in ranks.items()}
    _require_bounded(arrays, scales, ranks, source.path.parent)
    dtypes = {f"{tensor.module}.{tensor.matrix}": tensor.header.dtype for tensor in tensors}
    return AdapterContents(
        arrays=arrays,
        scales=scales,
        rank=max(ranks.values()),
        path=str(source.path.parent),
        ranks=ranks,
        dtypes=dtypes,
        config=config,
    )


def _require_bounded(
    arrays: Mapping[str, Floats], scales: Mapping[str, float], ranks: Mapping[str, int], directory: Path
) -> None:
    """Raise AdapterRequestError if scale x A B can have a value above `MAX_CHANGE`, or a scale is not finite."""
    for module, scale in scales.items():
        sizes = [max(-float(array.min()), float(array.max())) for array in (arrays[f"{module}.{m}"] for m in MATRICES)]
        change = abs(scale) * ranks[module] * math.prod(sizes)
        if not (math.isfinite(scale) and change <= MAX_CHANGE):
            named = f"{directory}: the scale {scale:g} of {visible(module, 100)}"
            raise invalid(f"{named} changes weights by up to {change:g}; at most {MAX_CHANGE:g} is permitted")


@contextmanager
def opened_tensors(path: Path, max_bytes: int) -> Iterator[AdapterSource]:
    """Open a safetensors file and read its header. Raises AdapterRequestError."""
    with _opened(path, max_bytes + MAX_HEADER_BYTES) as (file, size):
        try:
            headers, start = read_header(file, size, MAX_HEADER_BYTES)
        except ModelError as error:
            raise invalid(f"{path} is no valid safetensors file: {error}") from error

        def read(name: str) -> Floats | None:
            file.seek(start + headers[name].begin)
            return as_float32(file.read(headers[name].bytes), headers[name])

        yield AdapterSource(path, headers, read)


@contextmanager
def _opened(path: Path, limit: int) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file of at most `limit` bytes that is no link; yield it with its size."""
    try:
        file = open(path, "rb", opener=lambda name, _: os.open(name, FLAGS))  # noqa: SIM115, closed below
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AdapterRequestError(f"{path} does not exist", reason="missing") from error
    except (OSError, ValueError) as error:  # a directory among them; a ValueError for a NUL in the path
        raise invalid(f"{path} cannot be read: {one_line(error)}") from error
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise invalid(f"{path} is not a regular file")
        if status.st_size > limit:
            raise invalid(f"{path} has {status.st_size} bytes; at most {limit} are permitted")
        yield file, status.st_size


FROM_BLOCK = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..+|lm_head)$")


def _named(source: AdapterSource, form: AdapterFormat, config: Config, targets: Mapping[str, Target]) -> list[_Tensor]:
    """Return the tensors of the file with the module that each belongs to."""
    by_end = _modules_by_end(targets) if form is PEFT else {}
    tensors, unknown = [], []
    for name, header in source.headers.items():
        found = form.parse(name)
        module, expert = resolved(found, targets, by_end) if found else ("", None)
        is_other = found is None or module not in targets or (found.matrix == "m" and not config.is_dora)
        if found is None or is_other or (form is PEFT and found.embedding != targets[module].embedding):
            unknown.append(name)
            continue
        tensors.append(_Tensor(name, module, found.matrix, header, expert))
    if unknown:
        named = f"{source.path}: {_listed(unknown)}"
        if any("lora_embedding_" in one for one in unknown):
            raise invalid(f"{named}: embeddings with an adapter are not supported")
        hint = "; magnitudes of DoRA" if any("magnitude" in one or one.endswith(".m") for one in unknown) else ""
        raise invalid(f"{named}: no LoRA matrix of a linear layer of this model{hint}")
    if not tensors:
        raise invalid(f"{source.path} contains no tensors")
    return tensors


def resolved(found: TensorName, targets: Mapping[str, Target], by_end: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the module of the model, and the expert; an unknown module if there is none. by_end: for names of PEFT."""
    if found.module in targets or not by_end:
        return found.module, None
    module, expert = stacked_module(found.module)
    end = FROM_BLOCK.search(module)
    return (by_end.get(end[1], ""), expert) if end else ("", None)


def _modules_by_end(targets: Mapping[str, Target]) -> dict[str, str]:
    """Return modules by the part of their name from the block on, where this part is unique."""
    ends: dict[str, list[str]] = {}
    for name in targets:
        if found := FROM_BLOCK.search(name):
            ends.setdefault(found[1], []).append(name)
    return {end: names[0] for end, names in ends.items() if len(names) == 1}


def _ranks(
    tensors: list[_Tensor],
    form: AdapterFormat,
    targets: Mapping[str, Target],
    limits: AdaptersSection,
    path: Path,
) -> dict[str, int]:
    """Return the rank of every module, from the shapes in the header. Raises AdapterRequestError if one is wrong."""
    ranks: dict[str, int] = {}
    for tensor in tensors:
        if tensor.matrix != "m":
            ranks.setdefault(tensor.module, stated_rank(tensor.header, form, targets[tensor.module], tensor.matrix))
    problems = [_problem(one, ranks.get(one.module, 0), targets[one.module], limits, form) for one in tensors]
    wrong = [f"{tensor.name} {problem}" for tensor, problem in zip(tensors, problems, strict=True) if problem]
    given = {(tensor.module, tensor.matrix, tensor.expert) for tensor in tensors}
    pairs = [(one, other) for one in sorted(given, key=str) for other in MATRICES if other != one[1]]
    wrong += [f"{one[0]} has no {other}" for one, other in pairs if (one[0], other, one[2]) not in given]
    if wrong:
        raise invalid(f"{path} does not fit the model: {_listed(wrong)}")
    size = sum(FLOAT32_BYTES * math.prod(_shape(targets, ranks, module, m)) for module in ranks for m in MATRICES)
    if size > limits.max_bytes:
        raise invalid(f"{path} has {size} bytes in float32; at most {limits.max_bytes} are permitted")
    return ranks


def _problem(tensor: _Tensor, rank: int, target: Target, limits: AdaptersSection, form: AdapterFormat) -> str:
    """Return what is wrong with a tensor of a module of this rank; empty if nothing is."""
    header, expected = tensor.header, form.shape(target, tensor.matrix, rank)
    in_mixture = not form.stacked and target.experts > 0
    if (tensor.expert is not None) != in_mixture or (tensor.expert or 0) >= (target.experts or 1):
        return f"does not belong to one of {target.experts} experts"
    if header.shape != expected:
        return f"has shape {visible(str(header.shape), 60)}, not {expected}"
    if header.dtype not in DTYPES:
        return f"is {visible(header.dtype, 20)}, not one of {', '.join(DTYPES)}"
    if header.bytes != math.prod(header.shape) * DTYPES[header.dtype]:
        return f"has {header.bytes} bytes, which do not match its shape and type"
    return "" if 1 <= rank <= limits.max_rank else f"has rank {rank}; 1 to {limits.max_rank} are permitted"


MATRICES: tuple[Matrix, Matrix] = ("lora_a", "lora_b")


def stated_rank(header: TensorHeader, form: AdapterFormat, target: Target, matrix: Matrix) -> int:
    """Return the rank that the shape of A or B states; 0 if it has a wrong number of axes."""
    reference = form.shape(target, matrix, 0)
    return header.shape[reference.index(0)] if len(header.shape) == len(reference) else 0


def _shape(targets: Mapping[str, Target], ranks: Mapping[str, int], module: str, matrix: Matrix) -> tuple[int, ...]:
    return targets[module].shape(matrix, ranks[module])


def _read_arrays(
    source: AdapterSource,
    tensors: list[_Tensor],
    ranks: Mapping[str, int],
    targets: Mapping[str, Target],
    form: AdapterFormat,
) -> dict[str, Floats]:
    """Read all matrices as float32, in the layout of mlx-lm."""
    arrays: dict[str, Floats] = {}
    for tensor in tensors:
        values = source.read(tensor.name)
        if values is None or not np.isfinite(values).all():
            raise invalid(f"{source.path}: {visible(tensor.name, 200)} is not finite")
        key = f"{tensor.module}.{tensor.matrix}"
        if tensor.expert is not None:  # a matrix of one expert is (rank, inputs) or (outputs, rank), as mlx-lm has it
            shape = _shape(targets, ranks, tensor.module, tensor.matrix)
            arrays.setdefault(key, np.zeros(shape, np.float32))[tensor.expert] = values
        else:
            is_transposed = form.transposed and not targets[tensor.module].experts
            arrays[key] = np.ascontiguousarray(values.T) if is_transposed else values
    return dict(sorted(arrays.items()))


def as_float32(data: bytes, header: TensorHeader) -> Floats | None:
    """Return the values of a tensor; None if the file ended early."""
    if len(data) != header.bytes:
        return None
    if header.dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, "<f4" if header.dtype == "F32" else "<f2").astype(np.float32)
    return values.reshape(header.shape)


def _listed(items: list[str]) -> str:
    shown = "; ".join(visible(item, 200) for item in items[:MAX_SHOWN])
    return shown if len(items) <= MAX_SHOWN else f"{shown}; and {len(items) - MAX_SHOWN} more"


def as_arrays(contents: AdapterContents) -> dict[str, mx.array]:
    """Return the arrays of an adapter in MLX, evaluated; in a compute thread."""
    arrays = {name: mx.array(values) for name, values in contents.arrays.items()}
    mx.eval(arrays)
    return arrays
