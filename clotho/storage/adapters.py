"""Adapters on disk, in mlx-lm's own form: `mlx_lm.load(base, adapter_path=DIRECTORY)` just works.

The exception are checkpoints of runs that train embeddings or head beside an adapter: mlx-lm refuses to load other
weights beside one, and says so. `Policy.loadable` gives what it loads, for the directory that a run leaves.

Modules of several ranks in one adapter file: mlx-lm knows one rank, so smaller ones are padded with zeros.

Zero columns of A and zero rows of B add nothing to (x A) B: the padded adapter is the same function.
"""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_map_with_path

from clotho.storage.atomic_files import FileDigest, new_directory, replace_file, sync_directory, write_file
from clotho.storage.tensors import named_arrays, read_tensors, tensor_chunks
from protocols.checkpoint import AdapterConfig
from protocols.errors import CheckpointError, RunDirectoryError


def padded(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, mx.array]:
    """The arrays with every low-rank matrix at `lora_parameters.rank`; from any thread, for evaluated float32 ones.

    Those that have this rank, and all that are no low-rank matrices, are handed through.
    """
    result = dict(arrays)
    for name, (axis, rank, largest) in _smaller(arrays, config).items():
        widths = [(0, largest - rank if index == axis else 0) for index in range(arrays[name].ndim)]
        result[name] = mx.array(np.pad(np.asarray(arrays[name]), widths))
    return result


def unpadded(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, mx.array]:
    """The inverse of `padded`; evaluates, so in the compute thread.

    An array of another shape than `padded` gives is handed through. Raises `CheckpointError` where what is cut off is
    not zero.
    """
    result = dict(arrays)
    for name, (axis, rank, largest) in _smaller(arrays, config).items():
        if arrays[name].shape[axis] == largest:
            kept, rest = mx.split(arrays[name], [rank], axis=axis)
            if mx.any(rest != 0).item():
                raise CheckpointError(f"{name} is of a larger rank than {rank}, as which it is recorded")
            result[name] = mx.contiguous(kept)
    mx.eval(result)
    return result


def _smaller(arrays: Mapping[str, mx.array], config: AdapterConfig) -> dict[str, tuple[int, int, int]]:
    """By name: axis, rank, and rank in the file, of every low-rank matrix whose module has a rank of its own."""
    found: dict[str, tuple[int, int, int]] = {}
    if config.lora_parameters is None or not config.ranks:
        return found
    for name, array in arrays.items():
        module, _, matrix = name.partition(".lora_")
        keys = [key for key in config.lora_parameters.keys if f".{module}".endswith(f".{key}")]
        rank = config.ranks.get(max(keys, key=len)) if matrix and keys else None
        if rank is not None and array.ndim in (2, 3):
            axis = 1 if matrix.startswith("a") else 0 if array.ndim == 2 else 2
            found[name] = axis, rank, config.lora_parameters.rank
    return found


TENSORS = "adapters.safetensors"
CONFIG = "adapter_config.json"


def write_adapter(directory: Path, parameters: Any, config: AdapterConfig) -> None:
    """Write an adapter, or the weights of full training, to `directory`; from any thread, arrays evaluated.

    A new directory appears whole. In one that exists only the adapter's two files are replaced, each atomically, and
    never so that new tensors stand beside another configuration. Raises `RunDirectoryError` if it cannot be written.
    """
    try:
        if not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            with new_directory(directory) as unfinished:
                fill_adapter(unfinished, parameters, config)
            return
        text = _encode(config)
        if not _holds(directory / CONFIG, text):
            (directory / TENSORS).unlink(missing_ok=True)
            sync_directory(directory)
            replace_file(directory / CONFIG, [text])
        replace_file(directory / TENSORS, tensor_chunks(padded(named_arrays(parameters), config)))
    except OSError as error:
        raise RunDirectoryError(f"adapter {directory} cannot be written: {error.strerror or error}") from error


def fill_adapter(directory: Path, parameters: Any, config: AdapterConfig) -> list[FileDigest]:
    """Write the adapter's files into a directory that is still unfinished."""
    return [
        write_file(directory / TENSORS, tensor_chunks(padded(named_arrays(parameters), config))),
        write_file(directory / CONFIG, [_encode(config)]),
    ]


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read `adapter_config.json`, mlx-lm's or ours; keys that the loader ignores are ignored."""
    path = directory / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=AdapterConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def read_adapter(directory: Path, expected: Any, config: AdapterConfig) -> Any:
    """Read an adapter into a tree like `expected`, a policy's trainable parameters; in the compute thread.

    config: the policy's; ranks, scale and the rest must be the same. Raises `CheckpointError` that lists every tensor
    that is missing, not expected, of another shape or type, or not finite.
    """
    _refuse_other_config(directory, read_adapter_config(directory), config)
    arrays = unpadded(read_tensors(directory / TENSORS), config)
    faults = tensor_faults(arrays, named_arrays(expected))
    if faults:
        raise CheckpointError(f"{directory / TENSORS} does not fit the policy: {'; '.join(faults)}")
    return tree_map_with_path(lambda path, _: arrays[path], expected)


def tensor_faults(arrays: Mapping[str, mx.array], expected: Mapping[str, mx.array]) -> list[str]:
    """What is wrong with `arrays` where `expected` should be, a line each; reads values, so in the compute thread."""
    faults = [f"{name} is missing" for name in expected if name not in arrays]
    for name, array in arrays.items():
        if name not in expected:
            faults.append(f"{name} is not a trained parameter")
        elif array.shape != expected[name].shape:
            faults.append(f"{name} has shape {array.shape}, not {expected[name].shape}")
        elif array.dtype != expected[name].dtype:
            faults.append(f"{name} is {array.dtype}, not {expected[name].dtype}")
        elif not mx.isfinite(array).all().item():
            faults.append(f"{name} is not finite")
    return faults


def _refuse_other_config(directory: Path, found: AdapterConfig, wanted: AdapterConfig) -> None:
    theirs, ours = _settings(found), _settings(wanted)
    differing = [
        f"{key} is {theirs.get(key)}, not {ours.get(key)}"
        for key in sorted(theirs | ours)
        if theirs.get(key) != ours.get(key)
    ]
    if differing:
        raise CheckpointError(f"{directory / CONFIG} belongs to another policy: {'; '.join(differing)}")


def _settings(config: AdapterConfig) -> dict[str, object]:
    low_rank = msgspec.structs.asdict(config.lora_parameters) if config.lora_parameters else {}
    layers = {"num_layers": config.num_layers} if config.lora_parameters else {}
    more = {"ranks": config.ranks, "trained_weights": config.trained_weights}
    return {"fine_tune_type": config.fine_tune_type, **layers, **low_rank, **more}


def _encode(config: AdapterConfig) -> bytes:
    return msgspec.json.format(msgspec.json.encode(config, order="sorted"), indent=2) + b"\n"


def _holds(path: Path, contents: bytes) -> bool:
    return path.is_file() and path.read_bytes() == contents


def refuse_existing_adapter(adapter_path: str, own: Path, *, resumed: bool) -> None:
    """Raise `RunDirectoryError` if `adapter_path` holds an adapter that this run did not write.

    own: the run's adapter directory. A resumed run wrote the adapter if both directories hold the same tensors.
    """
    written = Path(adapter_path).expanduser() / TENSORS
    if not adapter_path or not written.exists():
        return
    if resumed and (own / TENSORS).is_file() and filecmp.cmp(written, own / TENSORS, shallow=False):
        return
    raise RunDirectoryError(
        f"checkpoint.adapter_path {adapter_path} already holds a trained adapter, and a run overwrites none but its own: "
        "name another directory (the adapter is written there; in mlx-lm, --adapter-path also loads one)"
    )
