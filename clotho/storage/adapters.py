"""Adapters on disk, in the format of mlx-lm: `mlx_lm.load(base, adapter_path=DIRECTORY)` loads them.

Exception: mlx-lm refuses checkpoints of runs that train embeddings or the head beside an adapter, because it does not
load other weights beside an adapter. `Policy.loadable` converts such a policy for the directory that a run leaves.

An adapter file of mlx-lm has one rank. Modules of a smaller rank are padded with zeros: zero columns of A and zero rows
of B do not change (x A) B.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_map_with_path
from numpy.typing import NDArray

from clotho.storage.atomic_files import (
    FileDigest,
    make_directory,
    new_directory,
    replace_file,
    replaced_from_directory,
    sync_directory,
    write_file,
)
from clotho.storage.tensors import named_arrays, read_tensors, write_tensors
from protocols.checkpoint import AdapterConfig
from protocols.errors import CheckpointError, RunDirectoryError, disk_errors_as, visible

TENSORS = "adapters.safetensors"
CONFIG = "adapter_config.json"
"""The configuration of an adapter, of mlx-lm and of PEFT."""

RANK_AXES: Mapping[tuple[str, int], int] = {
    ("lora_a", 2): 1, ("lora_b", 2): 0, ("lora_a", 3): 1, ("lora_b", 3): 2,
}  # fmt: skip
"""Axis of the rank in mlx-lm's layout, by matrix and number of axes."""


def padded(name: str, values: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
    """Return a matrix with zeros up to a rank. name: `MODULE.lora_a` or `MODULE.lora_b`; others are unchanged."""
    axis = RANK_AXES.get((name.rpartition(".")[2], values.ndim))
    if axis is None or values.shape[axis] >= rank:
        return values
    return np.pad(values, [(0, rank - size if index == axis else 0) for index, size in enumerate(values.shape)])


def pad_ranks(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, mx.array]:
    """Return arrays with low-rank matrices padded, evaluated and float32, to `lora_parameters.rank`; any thread."""
    result = dict(arrays)
    for name, (_, _, file_rank) in smaller_ranks(arrays, config).items():
        result[name] = mx.array(padded(name, np.asarray(arrays[name]), file_rank))
    return result


def unpad_ranks(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, mx.array]:
    """Return the inverse of `pad_ranks`, in a compute thread. Raises CheckpointError if the padding is not zero."""
    result = dict(arrays)
    for name, (axis, rank, file_rank) in smaller_ranks(arrays, config).items():
        if arrays[name].shape[axis] == file_rank:
            kept, padding = mx.split(arrays[name], [rank], axis=axis)
            if mx.any(padding != 0).item():
                raise CheckpointError(f"{name} has a larger rank than {rank}, the rank in its configuration")
            result[name] = mx.contiguous(kept)
    mx.eval(result)
    return result


def smaller_ranks(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, tuple[int, int, int]]:
    """Return (axis, rank, rank in the file) of every low-rank matrix whose module has a rank of its own."""
    found: dict[str, tuple[int, int, int]] = {}
    if config.lora_parameters is None or not config.ranks:
        return found
    for name, array in arrays.items():
        module, _, matrix = name.rpartition(".")
        axis = RANK_AXES.get((matrix, array.ndim))
        names = {*config.lora_parameters.keys, *config.ranks}
        keys = [key for key in names if f".{module}".endswith(f".{key}")]
        rank = config.ranks.get(max(keys, key=len)) if keys else None
        if rank is not None and axis is not None:
            found[name] = axis, rank, config.lora_parameters.rank
    return found


def require_own_adapter(directory: str | Path, run_id: str) -> None:
    """Raise RunDirectoryError if `directory` holds an adapter of another run than `run_id`."""
    directory = Path(directory).expanduser()
    if directory.exists() and not directory.is_dir():
        raise RunDirectoryError(f"{directory} is a file: choose another checkpoint.adapter_path")
    if not any((directory / name).exists() for name in (TENSORS, CONFIG)):
        return
    try:
        owner = read_adapter_config(directory).run_id
    except CheckpointError:
        owner = ""
    if owner != run_id:
        raise RunDirectoryError(
            f"{directory} holds an adapter that this run did not write: choose another checkpoint.adapter_path, or "
            "move the adapter away (Clotho writes to this directory; in mlx-lm, --adapter-path loads an adapter)"
        )


def write_adapter(directory: Path, parameters: Any, config: AdapterConfig) -> None:
    """Write an adapter, or the weights of full training, to `directory`; from any thread, arrays evaluated.

    A new directory appears complete. In an existing directory only the two files of the adapter are replaced, each
    atomically; new tensors never appear beside an old configuration. Raises RunDirectoryError if a write fails, or if
    `config.run_id` is set and the directory holds an adapter of another run.
    """
    if config.run_id:
        require_own_adapter(directory, config.run_id)
    with disk_errors_as(RunDirectoryError, f"adapter {directory} cannot be written"):
        if not directory.exists():
            make_directory(directory.parent)
            with new_directory(directory) as unfinished:
                fill_adapter(unfinished, parameters, config)
            return
        text = encode_config(config)
        if not _has_contents(directory / CONFIG, text):
            (directory / TENSORS).unlink(missing_ok=True)
            sync_directory(directory)
            replace_file(directory / CONFIG, [text])
        with replaced_from_directory(directory / TENSORS) as unfinished:
            write_tensors(unfinished / TENSORS, pad_ranks(named_arrays(parameters), config))


def fill_adapter(directory: Path, parameters: Any, config: AdapterConfig) -> list[FileDigest]:
    """Write the files of an adapter to an unfinished directory."""
    return [
        write_tensors(directory / TENSORS, pad_ranks(named_arrays(parameters), config)),
        write_file(directory / CONFIG, [encode_config(config)]),
    ]


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read `adapter_config.json` of Clotho or mlx-lm; unknown keys are ignored. Raises CheckpointError."""
    path = directory / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=AdapterConfig)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {visible(str(error), 200)}") from error


def read_adapter(directory: Path, expected: Any, config: AdapterConfig) -> Any:
    """Read an adapter into a tree like `expected` (the trainable parameters of a policy), in a compute thread.

    config: configuration of the policy; ranks, scale and modules must be equal. Raises CheckpointError with a list of
    every tensor that is missing, unexpected, not finite, or has another shape or dtype.
    """
    _require_same_config(directory, read_adapter_config(directory), config)
    arrays = unpad_ranks(read_tensors(directory / TENSORS), config)
    problems = tensor_problems(arrays, named_arrays(expected))
    if problems:
        raise CheckpointError(f"{directory / TENSORS} does not match the policy: {'; '.join(problems)}")
    return tree_map_with_path(lambda path, _: arrays[path], expected)


def tensor_problems(arrays: Mapping[str, mx.array], expected: Mapping[str, mx.array]) -> list[str]:
    """Return one line for every tensor of `arrays` that differs from `expected`; call it in a compute thread."""
    problems = [f"{name} is missing" for name in expected if name not in arrays]
    for name, array in arrays.items():
        if name not in expected:
            problems.append(f"{name} is not a trained parameter")
        elif array.shape != expected[name].shape:
            problems.append(f"{name} has shape {array.shape}, not {expected[name].shape}")
        elif array.dtype != expected[name].dtype:
            problems.append(f"{name} is {array.dtype}, not {expected[name].dtype}")
        elif not mx.isfinite(array).all().item():
            problems.append(f"{name} is not finite")
    return problems


def _require_same_config(directory: Path, found: AdapterConfig, expected: AdapterConfig) -> None:
    found_settings, expected_settings = _settings(found), _settings(expected)
    differences = [
        f"{key} is {visible(str(found_settings.get(key)), 100)}, not {expected_settings.get(key)}"
        for key in sorted(found_settings | expected_settings)
        if found_settings.get(key) != expected_settings.get(key)
    ]
    if differences:
        raise CheckpointError(f"{directory / CONFIG} belongs to another policy: {'; '.join(differences)}")


def _settings(config: AdapterConfig) -> dict[str, object]:
    low_rank = msgspec.structs.asdict(config.lora_parameters) if config.lora_parameters else {}
    layers = {"num_layers": config.num_layers} if config.lora_parameters else {}
    return {
        "fine_tune_type": config.fine_tune_type,
        **layers,
        **low_rank,
        "ranks": config.ranks,
        "trained_weights": config.trained_weights,
    }


def encode_config(config: object) -> bytes:
    """Return the contents of `adapter_config.json`. config: of mlx-lm or PEFT."""
    return msgspec.json.format(msgspec.json.encode(config, order="sorted"), indent=2) + b"\n"


def _has_contents(path: Path, contents: bytes) -> bool:
    return path.is_file() and path.read_bytes() == contents
