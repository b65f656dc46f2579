"""Adapter directories of mlx-lm and PEFT, validated before memory is allocated.

mlx-lm: `adapters.safetensors` and `adapter_config.json` with an absolute scale; A is (inputs, rank), B is
(rank, outputs). PEFT: `adapter_model.safetensors` and `adapter_config.json` with alpha; A and B are transposed, and the
scale is alpha / rank, or alpha / sqrt(rank) for rsLoRA (arXiv:2312.03732). Both become float32 arrays in the layout of
mlx-lm. A directory is foreign: links are not followed, sizes and names are compared with the model from the header of
the file, and values must be finite. Everything is NumPy, so any thread can read an adapter.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from msgspec import Struct
from numpy.typing import NDArray

from clotho.config.schema import AdaptersSection
from clotho.models.lora import AdaptedModule
from clotho.models.model_files import TensorHeader, one_line, read_header
from protocols.errors import AdapterRequestError, ModelError, visible

CONFIG, MLX_LM_TENSORS, PEFT_TENSORS = "adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 16 * 2**20
MAX_SHOWN = 5
"""Number of tensors that an error message names."""

DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
"""Types of tensors, with their bytes per value."""

FLOAT32_BYTES = 4
Floats = NDArray[np.float32]
Matrix = Literal["lora_a", "lora_b"]


class Target(Struct, frozen=True, kw_only=True):
    """A linear layer that can have an adapter. experts: number of experts of a mixture; 0 for an ordinary layer."""

    inputs: int
    outputs: int
    experts: int = 0

    def shape(self, matrix: Matrix, rank: int) -> tuple[int, ...]:
        """Return the shape of A or B in mlx-lm's layout."""
        if self.experts:
            return (self.experts, rank, self.inputs) if matrix == "lora_a" else (self.experts, self.outputs, rank)
        return (self.inputs, rank) if matrix == "lora_a" else (rank, self.outputs)


class AdapterContents(Struct, frozen=True, kw_only=True, eq=False):
    """The validated contents of an adapter directory.

    arrays: `MODULE.lora_a` and `MODULE.lora_b` in mlx-lm's layout. scales: the absolute scale of each module.
    rank: the largest rank. path: the directory.
    """

    arrays: dict[str, Floats]
    scales: dict[str, float]
    rank: int
    path: str

    @property
    def bytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def adapter_targets(model: nn.Module, adapted: tuple[AdaptedModule, ...] = ()) -> dict[str, Target]:
    """Return the linear layers of a model by name. adapted: modules that hold the policy's adapter over a layer."""
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
    return targets


class _LoRAParameters(Struct, frozen=True, kw_only=True):
    """The part of mlx-lm's `lora_parameters` that changes what an adapter computes."""

    scale: float


class _MlxLmConfig(Struct, frozen=True, kw_only=True):
    """The part of mlx-lm's configuration that changes what an adapter computes."""

    lora_parameters: _LoRAParameters
    fine_tune_type: str = "lora"
    trained_weights: tuple[str, ...] = ()


class _PeftConfig(Struct, frozen=True, kw_only=True):
    """The part of PEFT's configuration that changes what an adapter computes."""

    peft_type: str
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, float] | None = None


class _Tensor(NamedTuple):
    """Where a matrix of a module is in the file. expert: index of the expert that a PEFT matrix belongs to."""

    name: str
    module: str
    matrix: Matrix
    header: TensorHeader
    expert: int | None = None


def read_adapter(directory: Path, targets: Mapping[str, Target], limits: AdaptersSection) -> AdapterContents:
    """Read and validate an adapter directory, in any thread.

    targets: the layers of the model. Raises AdapterRequestError with reason `missing` if a file does not exist, and
    `invalid` for all other failures: an unknown format, DoRA, a full fine-tuning, weights beside the adapter, tensors
    that do not fit the model, a rank or a size above the limits, or values that are not finite.
    """
    config = _read_config(directory)
    path = directory / (PEFT_TENSORS if isinstance(config, _PeftConfig) else MLX_LM_TENSORS)
    with _opened(path, limits.max_bytes + MAX_HEADER_BYTES) as (file, size):
        try:
            headers, start = read_header(file, size, MAX_HEADER_BYTES)
        except ModelError as error:
            raise _invalid(f"{path} is no valid safetensors file: {error}") from error
        tensors = _named(headers, config, targets, path)
        ranks = _ranks(tensors, isinstance(config, _PeftConfig), targets, limits, path)
        arrays = _read_arrays(file, start, tensors, ranks, targets, path, transposed=isinstance(config, _PeftConfig))
    scales = {module: _scale(config, module, rank) for module, rank in ranks.items()}
    if not all(map(math.isfinite, scales.values())):
        raise _invalid(f"{directory / CONFIG}: the scale is not finite")
    return AdapterContents(arrays=arrays, scales=scales, rank=max(ranks.values()), path=str(directory))


def _invalid(message: str) -> AdapterRequestError:
    return AdapterRequestError(message, reason="invalid")


@contextmanager
def _opened(path: Path, limit: int) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file of at most `limit` bytes that is no link; yield it with its size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AdapterRequestError(f"{path} does not exist", reason="missing") from error
    except (OSError, ValueError) as error:
        raise _invalid(f"{path} cannot be read: {one_line(error)}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _invalid(f"{path} is not a regular file")
        if status.st_size > limit:
            raise _invalid(f"{path} has {status.st_size} bytes; at most {limit} are permitted")
        yield file, status.st_size


def _read_config(directory: Path) -> _MlxLmConfig | _PeftConfig:
    """Read the configuration. Raises AdapterRequestError unless it describes a plain LoRA adapter."""
    path = directory / CONFIG
    with _opened(path, MAX_CONFIG_BYTES) as (file, _):
        text = file.read()
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
        if "peft_type" in fields:
            peft = msgspec.convert(fields, _PeftConfig)
            _require_plain_peft(peft, path)
            return peft
        kind = fields.get("fine_tune_type", "lora")
        if kind != "lora":
            raise _invalid(
                f"{path}: fine_tune_type is {visible(repr(kind), 40)}; only lora can be served beside others"
            )
        config = msgspec.convert(fields, _MlxLmConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(f"{path} is no adapter configuration of mlx-lm or PEFT: {one_line(error)}") from error
    if config.trained_weights:
        raise _invalid(f"{path}: trained_weights is set; weights beside the adapter cannot be served")
    return config


def _require_plain_peft(config: _PeftConfig, path: Path) -> None:
    if config.peft_type.upper() != "LORA":
        raise _invalid(f"{path}: peft_type is {visible(config.peft_type, 40)}; only LORA is supported")
    for key, unsupported in (
        ("use_dora", config.use_dora),
        ("bias", config.bias != "none"),
        ("modules_to_save", bool(config.modules_to_save)),
    ):
        if unsupported:
            raise _invalid(f"{path}: {key} is {visible(repr(getattr(config, key)), 40)}, which is not supported")


def _scale(config: _MlxLmConfig | _PeftConfig, module: str, rank: int) -> float:
    if isinstance(config, _MlxLmConfig):
        return config.lora_parameters.scale
    alpha = config.lora_alpha
    for pattern, own in (config.alpha_pattern or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = own
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


MLX_LM_NAME = re.compile(r"(?P<module>.+)\.(?P<matrix>lora_[ab])")
PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<matrix>lora_[AB])(?:\.default)?\.weight")
EXPERT_NAME = re.compile(r"(?P<before>.+)\.experts\.(?P<expert>\d{1,5})\.(?P<layer>\w+)")
EXPERT_LAYERS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Names of Mixtral's expert layers, and their names in mlx-lm."""

FROM_BLOCK = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..+|lm_head)$")


def _named(
    headers: Mapping[str, TensorHeader], config: _MlxLmConfig | _PeftConfig, targets: Mapping[str, Target], path: Path
) -> list[_Tensor]:
    """Return the tensors of the file with the module that each belongs to."""
    is_peft = isinstance(config, _PeftConfig)
    by_end = _modules_by_end(targets) if is_peft else {}
    tensors, unknown = [], []
    for name, header in headers.items():
        found = (PEFT_NAME if is_peft else MLX_LM_NAME).fullmatch(name)
        module, expert = (found["module"], None) if found else ("", None)
        if is_peft and module not in targets:
            module, expert = _peft_module(module, by_end)
        if found is None or module not in targets:
            unknown.append(name)
            continue
        matrix: Matrix = "lora_a" if found["matrix"].lower() == "lora_a" else "lora_b"
        tensors.append(_Tensor(name, module, matrix, header, expert))
    if unknown:
        hint = "; DoRA is not supported" if any("magnitude" in one or one.endswith(".m") for one in unknown) else ""
        raise _invalid(f"{path}: {_listed(unknown)}: no LoRA matrix of a linear layer of this model{hint}")
    if not tensors:
        raise _invalid(f"{path} contains no tensors")
    return tensors


def _modules_by_end(targets: Mapping[str, Target]) -> dict[str, str]:
    """Return modules by the part of their name from the block on, where this part is unique."""
    ends: dict[str, list[str]] = {}
    for name in targets:
        if found := FROM_BLOCK.search(name):
            ends.setdefault(found[1], []).append(name)
    return {end: names[0] for end, names in ends.items() if len(names) == 1}


def _peft_module(module: str, by_end: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the module of mlx-lm for a module of the Hugging Face model, and the expert; empty if there is none."""
    expert = None
    if found := EXPERT_NAME.fullmatch(module):
        expert = int(found["expert"])
        module = f"{found['before']}.switch_mlp.{EXPERT_LAYERS.get(found['layer'], found['layer'])}"
    end = FROM_BLOCK.search(module)
    return (by_end.get(end[1], ""), expert) if end else ("", None)


def _ranks(
    tensors: list[_Tensor], is_peft: bool, targets: Mapping[str, Target], limits: AdaptersSection, path: Path
) -> dict[str, int]:
    """Return the rank of every module, from the shapes in the header. Raises AdapterRequestError if one is wrong."""
    ranks: dict[str, int] = {}
    for tensor in tensors:
        whole = _stored(targets[tensor.module], is_peft)
        ranks.setdefault(tensor.module, _stated_rank(tensor, whole, transposed=is_peft))
    problems = [_problem(tensor, ranks[tensor.module], targets[tensor.module], limits, is_peft) for tensor in tensors]
    wrong = [f"{tensor.name} {problem}" for tensor, problem in zip(tensors, problems, strict=True) if problem]
    given = {(tensor.module, tensor.matrix, tensor.expert) for tensor in tensors}
    for module, matrix, expert in sorted(given, key=str):
        other: Matrix = "lora_b" if matrix == "lora_a" else "lora_a"
        if (module, other, expert) not in given:
            wrong.append(f"{module} has no {other}")
    if wrong:
        raise _invalid(f"{path} does not fit the model: {_listed(wrong)}")
    size = sum(FLOAT32_BYTES * math.prod(_shape(targets, ranks, module, m)) for module in ranks for m in MATRICES)
    if size > limits.max_bytes:
        raise _invalid(f"{path} has {size} bytes in float32; at most {limits.max_bytes} are permitted")
    return ranks


def _problem(tensor: _Tensor, rank: int, target: Target, limits: AdaptersSection, is_peft: bool) -> str:
    """Return what is wrong with a tensor of a module of this rank; empty if nothing is."""
    header, expected = tensor.header, _stored(target, is_peft).shape(tensor.matrix, rank)
    if is_peft:
        expected = expected[::-1]
    if (tensor.expert is not None) != (is_peft and target.experts > 0) or (tensor.expert or 0) >= (target.experts or 1):
        return f"does not belong to one of {target.experts} experts"
    if header.shape != expected:
        return f"has shape {visible(str(header.shape), 60)}, not {expected}"
    if header.dtype not in DTYPES:
        return f"is {visible(header.dtype, 20)}, not one of {', '.join(DTYPES)}"
    if header.bytes != math.prod(header.shape) * DTYPES[header.dtype]:
        return f"has {header.bytes} bytes, which do not match its shape and type"
    return "" if 1 <= rank <= limits.max_rank else f"has rank {rank}; 1 to {limits.max_rank} are permitted"


def _stored(target: Target, is_peft: bool) -> Target:
    """Return the layer that one tensor belongs to: PEFT stores the experts of a layer one by one."""
    return Target(inputs=target.inputs, outputs=target.outputs) if is_peft else target


MATRICES: tuple[Matrix, Matrix] = ("lora_a", "lora_b")


def _stated_rank(tensor: _Tensor, target: Target, *, transposed: bool) -> int:
    """Return the rank that the shape of a tensor states; 0 if it has a wrong number of axes."""
    shape, reference = tensor.header.shape, target.shape(tensor.matrix, 0)
    if len(shape) != len(reference):
        return 0
    return (shape[::-1] if transposed else shape)[reference.index(0)]


def _shape(targets: Mapping[str, Target], ranks: Mapping[str, int], module: str, matrix: Matrix) -> tuple[int, ...]:
    return targets[module].shape(matrix, ranks[module])


def _read_arrays(
    file: BinaryIO,
    start: int,
    tensors: list[_Tensor],
    ranks: Mapping[str, int],
    targets: Mapping[str, Target],
    path: Path,
    *,
    transposed: bool,
) -> dict[str, Floats]:
    """Read all matrices as float32, in the layout of mlx-lm."""
    arrays: dict[str, Floats] = {}
    for tensor in tensors:
        file.seek(start + tensor.header.begin)
        values = _as_float32(file.read(tensor.header.bytes), tensor.header)
        if values is None or not np.isfinite(values).all():
            raise _invalid(f"{path}: {visible(tensor.name, 200)} is not finite")
        key = f"{tensor.module}.{tensor.matrix}"
        if tensor.expert is not None:  # a matrix of one expert is (rank, inputs) or (outputs, rank), as mlx-lm has it
            shape = _shape(targets, ranks, tensor.module, tensor.matrix)
            arrays.setdefault(key, np.zeros(shape, np.float32))[tensor.expert] = values
        else:
            arrays[key] = np.ascontiguousarray(values.T) if transposed else values
    return dict(sorted(arrays.items()))


def _as_float32(data: bytes, header: TensorHeader) -> Floats | None:
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
    """Return the arrays of an adapter in MLX, evaluated; in the compute thread."""
    arrays = {name: mx.array(values) for name, values in contents.arrays.items()}
    mx.eval(arrays)
    return arrays
