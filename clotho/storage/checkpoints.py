"""Checkpoints: the whole run in one directory each, complete or absent, proven by a manifest.

MANIFEST.json: the last file of a checkpoint to be written, and the proof that all the others are whole.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from msgspec import Struct

from clotho.storage.adapters import fill_adapter, read_adapter
from clotho.storage.atomic_files import FileDigest, digest_file, new_directory, write_file
from clotho.storage.tensors import named_arrays, read_tensors, tensor_chunks
from protocols.checkpoint import AdapterConfig, RunState
from protocols.errors import CheckpointError, RunDirectoryError
from protocols.step import ReplayGroup

MANIFEST = "MANIFEST.json"


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every other file of the directory, with size and hash. format: of the checkpoint, raised when it changes."""

    format: int
    files: tuple[FileDigest, ...]


FORMAT = 1


def write_manifest(directory: Path, files: list[FileDigest]) -> None:
    """Seal a directory that is still unfinished."""
    manifest = Manifest(format=FORMAT, files=tuple(files))
    write_file(directory / MANIFEST, [msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"])


def damage(directory: Path, *, sizes_only: bool = False) -> str | None:
    """What is wrong with a sealed directory, in a few words; None if every byte is as it was written.

    sizes_only: compare sizes but do not read the files.
    """
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
        if manifest.format != FORMAT:
            return f"{MANIFEST} has format {manifest.format}; this program reads {FORMAT}"
        for file in manifest.files:
            path = directory / file.name
            if path.stat().st_size != file.size or (not sizes_only and digest_file(path) != file):
                return f"{file.name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, msgspec.MsgspecError) as error:
        return f"{MANIFEST} or a file cannot be read: {error}"
    return None


OPTIMIZER = "optimizer.safetensors"
REPLAY = "replay.msgpack"
STATE = "state.json"
NAME = re.compile(r"step-(\d{6,})")


class Snapshot(Struct, frozen=True, kw_only=True):
    """What is written. parameters, optimizer: trees of evaluated arrays, nested or flat, that nobody writes to.

    replay: groups in the replay buffer; no file is written where there are none.
    """

    parameters: Any
    optimizer: Any
    state: RunState
    adapter_config: AdapterConfig
    replay: tuple[ReplayGroup, ...] = ()


class Checkpoint(Struct, frozen=True, kw_only=True):
    """What is read back. parameters: a tree like the policy's; optimizer: flat, by dotted name."""

    state: RunState
    parameters: Any
    optimizer: dict[str, mx.array]
    replay: tuple[ReplayGroup, ...]


class Found(Struct, frozen=True, kw_only=True):
    """The newest checkpoint that is whole, if there is one, and a warning for each newer one that is not."""

    path: Path | None
    warnings: tuple[str, ...]


def write_checkpoint(directory: Path, snapshot: Snapshot, *, keep_last: int) -> Path:
    """Write `directory`/step-000050, then remove older checkpoints beyond `keep_last`; from any thread.

    Killed at any moment, it leaves the checkpoints of before, or those and a whole new one. Raises
    `RunDirectoryError` if the disk refuses, with the older checkpoints as they were.
    """
    path = directory / f"step-{snapshot.state.step:06d}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with new_directory(path) as unfinished:
            files = fill_adapter(unfinished, snapshot.parameters, snapshot.adapter_config)
            files.append(write_file(unfinished / OPTIMIZER, tensor_chunks(named_arrays(snapshot.optimizer))))
            files.append(write_file(unfinished / STATE, [msgspec.json.encode(snapshot.state)]))
            if snapshot.replay:
                files.append(write_file(unfinished / REPLAY, [msgspec.msgpack.encode(snapshot.replay)]))
            write_manifest(unfinished, files)
        prune(directory, keep_last)
    except OSError as error:
        raise RunDirectoryError(
            f"checkpoint {path} cannot be written: {error.strerror or error}; earlier checkpoints are untouched"
        ) from error
    return path


def latest(directory: Path) -> Found:
    """Find the newest checkpoint whose every byte is as it was written; damaged ones are stepped over."""
    warnings: list[str] = []
    for path in _newest_first(directory):
        fault = damage(path)
        if fault is None:
            return Found(path=path, warnings=tuple(warnings))
        warnings.append(f"checkpoint {path} is damaged and was skipped: {fault}")
    return Found(path=None, warnings=tuple(warnings))


def read_state(path: Path) -> RunState:
    """Read how far the run had come, without its tensors. Raises `CheckpointError`."""
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=RunState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path / STATE} cannot be used: {error}") from error


def read_checkpoint(path: Path, *, expected: Any, adapter_config: AdapterConfig) -> Checkpoint:
    """Read a checkpoint for a policy with these trainable parameters; in the compute thread.

    Raises `CheckpointError` if a byte differs from what was written, or if it belongs to another policy.
    """
    fault = damage(path)
    if fault is not None:
        raise CheckpointError(f"checkpoint {path} is damaged: {fault}")
    return Checkpoint(
        state=read_state(path),
        parameters=read_adapter(path, expected, adapter_config),
        optimizer=read_tensors(path / OPTIMIZER),
        replay=_read_replay(path / REPLAY),
    )


def _read_replay(path: Path) -> tuple[ReplayGroup, ...]:
    if not path.exists():
        return ()
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=tuple[ReplayGroup, ...])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def prune(directory: Path, keep_last: int) -> None:
    """Keep the newest `keep_last` whole checkpoints; remove older ones, and damaged ones older than the newest whole.

    Only the newest is read through; of the others the sizes are compared. The newest whole one always stays.
    """
    newest = latest(directory).path
    if newest is None:
        return
    older = [path for path in _newest_first(directory) if _step(path) < _step(newest)]
    whole = [path for path in older if damage(path, sizes_only=True) is None]
    kept = set(whole[: keep_last - 1])
    for path in older:
        if path not in kept:
            shutil.rmtree(path)


def refuse_other_inputs(state: RunState, inputs: Mapping[str, str]) -> None:
    """Raise `CheckpointError` that names each input (model, tokenizer, dataset) that is not what the run began with."""
    changed = sorted(name for name in state.inputs.keys() | inputs.keys() if state.inputs.get(name) != inputs.get(name))
    if changed:
        raise CheckpointError(f"cannot resume: changed since the run began: {', '.join(changed)}")


def _newest_first(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if NAME.fullmatch(path.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
