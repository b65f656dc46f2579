"""Adapters of every format, read from a path and validated before memory is allocated.

`training_run/adapters/formats.py` defines the formats. A directory is foreign: links are not followed, sizes and names
are compared with the model from the header of the file, and values must be finite. Everything is NumPy, so any thread
can read an adapter. Adapters of mlx-lm and PEFT are read beside a model, and those of mlx-lm, which a run
writes, from any path; the table of adapter formats has what reads the others from any path.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from msgspec.structs import replace

from clotho.extension import TableDoor, provided
from clotho.models.model_files import TensorHeader, one_line, read_header
from clotho.settings.server import AdaptersSection
from clotho.storage.adapters import CONFIG, RANK_AXES
from protocols.errors import AdapterRequestError, ArtifactError, ModelError, visible
from training_run.adapters.contents import Adapter, Base, Floats, open_base_model, recorded_base
from training_run.adapters.formats import (
    DTYPES,
    GGUF,
    LABELS,
    MLX,
    NPZ,
    PEFT,
    TENSORS_OF,
    AdapterFormat,
    Config,
    FormatName,
    Matrix,
    PeftConfig,
    Target,
    TensorName,
    invalid,
    is_named,
    parse_config,
    stacked_module,
)

MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 16 * 2**20
MAX_SHOWN = 5
"""Number of tensors that an error message names."""

FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, and a pipe is not waited for."""

FLOAT32_BYTES = 4

MAX_CHANGE = 65_504.0
"""Largest change of a weight, the largest number in float16. The weights of models are below 100."""

UNLIMITED = AdaptersSection(max_bytes=2**50, max_rank=2**20)
"""Limits of an adapter that the user chose, not a client."""

TEXT_MODEL = re.compile(r"model\.layers\.\d+\..+|lm_head|model\.embed_tokens")
"""Names of layers that are the same in mlx-lm and Hugging Face."""


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


def read_adapter(directory: Path, targets: Mapping[str, Target], limits: AdaptersSection) -> Adapter:
    """Read and validate an adapter directory with LoRA matrices, in any thread.

    targets: the layers of the model. Raises AdapterRequestError with reason `missing` if a file does not exist, and
    `invalid` for all other failures: an unknown format, magnitudes, a full fine-tuning, weights beside the adapter,
    tensors that do not fit the model, a rank or a size above the limits, or values that are not finite.
    """
    config = read_config(directory)
    if isinstance(config, PeftConfig) and config.modules_to_save:
        raise invalid(f"{directory / CONFIG}: modules_to_save is set; weights beside the adapter cannot be served")
    if config.method != "lora":
        stated = f"{config.method_key} states {LABELS[config.method]}"
        raise invalid(f"{directory / CONFIG}: {stated}; only LoRA can be served beside other adapters")
    with opened_tensors(directory / config.form.tensors, limits.max_bytes) as source:
        return _Reading(source, config.form, config, targets, limits).adapter()


def read_config(directory: Path) -> Config:
    """Read the configuration of an adapter directory. Raises AdapterRequestError."""
    path = directory / CONFIG
    with _opened(path, MAX_CONFIG_BYTES) as (file, _):
        return parse_config(file.read(), path)


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
def opened_tensors(path: Path, max_bytes: int = UNLIMITED.max_bytes) -> Iterator[AdapterSource]:
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


class _Reading(NamedTuple):
    """A file, its format and configuration, and what they are compared with: the layers of the model, and limits."""

    source: AdapterSource
    form: AdapterFormat
    config: Config
    targets: Mapping[str, Target]
    limits: AdaptersSection

    def adapter(self) -> Adapter:
        """Compare the tensors with the layers of the model, then read them. Raises AdapterRequestError."""
        tensors, config = self._named(), self.config
        ranks, directory = self._ranks(tensors), self.source.path.parent
        arrays = self._arrays(tensors, ranks)
        scales = {module: config.scale(module, rank) for module, rank in ranks.items()}
        _require_bounded(arrays, scales, ranks, directory)
        return Adapter(
            path=directory,
            format=self.form.name,
            method=config.method,
            dropout=config.dropout,
            arrays=arrays,
            scales=scales,
            ranks=ranks,
            dtypes={f"{tensor.module}.{tensor.matrix}": tensor.header.dtype for tensor in tensors},
            targets={module: self.targets[module] for module in ranks},
            base_name=config.base or "",
            base_quantization=config.base_quantization,
        )

    def _named(self) -> list[_Tensor]:
        """Return the tensors of the file with the module that each belongs to."""
        path, in_peft = self.source.path, self.form is PEFT
        by_end = _modules_by_end(self.targets) if in_peft else {}
        tensors, unknown = [], []
        for name, header in self.source.headers.items():
            found = self.form.parse(name)
            module, expert = resolved(found, self.targets, by_end) if found else ("", None)
            is_other = found is None or module not in self.targets or found.matrix not in TENSORS_OF[self.config.method]
            if found is None or is_other or (in_peft and found.embedding != self.targets[module].embedding):
                unknown.append(name)
                continue
            tensors.append(_Tensor(name, module, found.matrix, header, expert))
        if unknown:
            named = f"{path}: {listed(unknown)}"
            if any("lora_embedding_" in one for one in unknown):
                raise invalid(f"{named}: embeddings with an adapter are not supported")
            hint = "; it has magnitudes" if any("magnitude" in one or one.endswith(".m") for one in unknown) else ""
            raise invalid(f"{named}: no LoRA matrix of a linear layer of this model{hint}")
        if not tensors:
            raise invalid(f"{path} contains no tensors")
        return tensors

    def _ranks(self, tensors: list[_Tensor]) -> dict[str, int]:
        """Return the rank of every module, from the shapes in the header. Raises AdapterRequestError."""
        path, targets, ranks = self.source.path, self.targets, dict[str, int]()
        for one in tensors:
            if one.matrix != "m":
                ranks.setdefault(one.module, stated_rank(one.header, self.form, targets[one.module], one.matrix))
        problems = [(one.name, self._problem(one, ranks.get(one.module, 0))) for one in tensors]
        wrong = [f"{name} {problem}" for name, problem in problems if problem]
        given = {(one.module, one.matrix, one.expert) for one in tensors}
        layers = sorted({(one.module, one.expert) for one in tensors}, key=str)
        pairs = [(layer, matrix) for layer in layers for matrix in TENSORS_OF[self.config.method]]
        wrong += [f"{layer[0]} has no {matrix}" for layer, matrix in pairs if (layer[0], matrix, layer[1]) not in given]
        if wrong:
            raise invalid(f"{path} does not fit the model: {listed(wrong)}")
        shapes = [targets[module].shape(matrix, rank) for module, rank in ranks.items() for matrix in MATRICES]
        size = FLOAT32_BYTES * sum(map(math.prod, shapes))
        if size > self.limits.max_bytes:
            raise invalid(f"{path} has {size} bytes in float32; at most {self.limits.max_bytes} are permitted")
        return ranks

    def _problem(self, tensor: _Tensor, rank: int) -> str:
        """Return what is wrong with a tensor of a module of this rank; empty if nothing is."""
        header, target, most = tensor.header, self.targets[tensor.module], self.limits.max_rank
        expected = self.form.shape(target, tensor.matrix, rank)
        in_mixture = not self.form.stacked and target.experts > 0
        if (tensor.expert is not None) != in_mixture or (tensor.expert or 0) >= (target.experts or 1):
            return f"does not belong to one of {target.experts} experts"
        if header.shape != expected:
            return f"has shape {visible(str(header.shape), 60)}, not {expected}"
        if header.dtype not in DTYPES:
            return f"is {visible(header.dtype, 20)}, not one of {', '.join(DTYPES)}"
        if header.bytes != math.prod(header.shape) * DTYPES[header.dtype]:
            return f"has {header.bytes} bytes, which do not match its shape and type"
        return "" if 1 <= rank <= most else f"has rank {rank}; 1 to {most} are permitted"

    def _arrays(self, tensors: list[_Tensor], ranks: Mapping[str, int]) -> dict[str, Floats]:
        """Read all matrices as float32, in the layout of mlx-lm."""
        arrays: dict[str, Floats] = {}
        for tensor in tensors:
            values, target = self.source.read(tensor.name), self.targets[tensor.module]
            if values is None or not np.isfinite(values).all():
                raise invalid(f"{self.source.path}: {visible(tensor.name, 200)} is not finite")
            key = f"{tensor.module}.{tensor.matrix}"
            if tensor.expert is not None:  # that of one expert is (rank, inputs) or (outputs, rank), as mlx-lm has it
                empty = np.zeros(target.shape(tensor.matrix, ranks[tensor.module]), np.float32)
                arrays.setdefault(key, empty)[tensor.expert] = values
            else:
                is_transposed = self.form.transposed and not target.experts
                arrays[key] = np.ascontiguousarray(values.T) if is_transposed else values
        return dict(sorted(arrays.items()))


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


MATRICES = TENSORS_OF["lora"]


def stated_rank(header: TensorHeader, form: AdapterFormat, target: Target, matrix: Matrix) -> int:
    """Return the rank that the shape of A or B states; 0 if it has a wrong number of axes."""
    reference = form.shape(target, matrix, 0)
    return header.shape[reference.index(0)] if len(header.shape) == len(reference) else 0


def as_float32(data: bytes, header: TensorHeader) -> Floats | None:
    """Return the values of a tensor; None if the file ended early."""
    if len(data) != header.bytes:
        return None
    if header.dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, "<f4" if header.dtype == "F32" else "<f2").astype(np.float32)
    return values.reshape(header.shape)


def listed(items: Sequence[str]) -> str:
    """Return items for a message: the first ones, and the number of the others."""
    shown = "; ".join(visible(item, 200) for item in items[:MAX_SHOWN])
    return shown if len(items) <= MAX_SHOWN else f"{shown}; and {len(items) - MAX_SHOWN} more"


ReadAdapter = Callable[[Path, Base | None], Adapter]
"""Reads an adapter of one format. The base model is that of `read_adapter_of`, None if none was named.

Raises ArtifactError, AdapterRequestError or ModelError.
"""

ADAPTER_FORMATS: TableDoor[str] = TableDoor(
    "attachment.ADAPTER_FORMATS", {"gguf": "files", "npz": "files", "peft": "files"}
)
"""What reads adapters of each format: `module:name` of a `ReadAdapter`."""


def read_adapter_of(path: Path, model: str = "") -> Adapter:
    """Read an adapter of any format.

    path: a directory of mlx-lm or PEFT, a directory with `adapter.npz`, such a file, a GGUF file, or the directory of a
    run or checkpoint. model: the base model, as in `model.path`; without it, the base model that the adapter names is
    used if it is on this machine. Raises ArtifactError, AdapterRequestError or ModelError.
    """
    base = open_base_model(model) if model else None
    name = _format_of(path)
    if name == MLX.name:
        directory, config, base = opened_directory(path, base)
        with opened_tensors(directory / MLX.tensors) as file:
            return adapter_from(file, MLX, config, base, path=path)
    place = ADAPTER_FORMATS().get(name)
    if place is None:
        raise ArtifactError(f"{path}: the format {name} {ADAPTER_FORMATS.absence(name)}", reason="unreadable")
    read: ReadAdapter = provided(place)
    return read(path, base)


def _format_of(path: Path) -> FormatName:
    """Return the format of the adapter at a path. Raises ArtifactError or AdapterRequestError if there is none."""
    if path.suffix == ".gguf":
        return GGUF.name
    directory = adapter_directory(path)
    form = read_config(directory).form
    only_npz = form is MLX and not (directory / MLX.tensors).exists() and (directory / NPZ.tensors).exists()
    return NPZ.name if path.suffix == ".npz" or only_npz else form.name


def opened_directory(path: Path, base: Base | None) -> tuple[Path, Config, Base | None]:
    """Return the directory of an adapter, its configuration, and the base model, by default the one that it names."""
    directory = adapter_directory(path)
    config = read_config(directory)
    return directory, config, base or recorded_base(config.base or "", directory, *directory.parents[:3])


def adapter_directory(path: Path) -> Path:
    """Return the directory with the configuration. Raises ArtifactError if there is none."""
    for place in (path, path / "adapters", path.parent if path.suffix in (".npz", ".safetensors") else path):
        if (place / CONFIG).is_file():
            return place
    what = f"has no {CONFIG}" if path.exists() else "does not exist"
    raise ArtifactError(f"{path} {what}: it is no adapter of mlx-lm, PEFT, NPZ or GGUF", reason="unreadable")


def adapter_from(
    source: AdapterSource, form: AdapterFormat, config: Config, base: Base | None, *, path: Path
) -> Adapter:
    """Validate the tensors of a file; return the adapter without the padding of ranks, which Clotho's files record.

    base: the base model; without it, the layers are those that the shapes in the file state. path: what the user named.
    """
    targets = base.targets if base else stated_targets(source, form)
    found = _Reading(source, form, config, targets, UNLIMITED).adapter()
    arrays, ranks = dict(found.arrays), dict(found.ranks)
    for module, rank in found.ranks.items():
        keys = [key for key in config.ranks if is_named(module, key)]
        smaller = config.ranks[max(keys, key=len)] if keys else rank
        if smaller < rank:
            ranks[module] = smaller
            for name in (f"{module}.{matrix}" for matrix in MATRICES):
                axis = RANK_AXES[name.rpartition(".")[2], arrays[name].ndim]
                kept, padding = np.split(arrays[name], [smaller], axis=axis)
                if padding.any():
                    raise ArtifactError(f"{path}: {name} has a larger rank than {smaller}", reason="unreadable")
                arrays[name] = np.ascontiguousarray(kept)
    return replace(found, path=path, arrays=arrays, ranks=ranks, base=base)


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
