"""Checkpoints: the complete state of a run, one directory per step, with a manifest that proves completeness.

`MANIFEST.json` lists size and SHA-256 digest of every other file. It is written last.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from msgspec import Struct

from clotho.storage.adapters import CONFIG, TENSORS, fill_adapter, read_adapter
from clotho.storage.atomic_files import (
    FileDigest,
    digest_file,
    make_directory,
    new_directory,
    replace_file,
    write_file,
)
from clotho.storage.tensors import named_arrays, read_tensors, write_tensors
from protocols.checkpoint import AdapterConfig, Part, RunState
from protocols.errors import CheckpointError, RunDirectoryError, disk_errors_as, visible
from training_run.directory.jsonl import line_of_step

MANIFEST = "MANIFEST.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
PROFILE = "profile.toml"
METRICS = "metrics.json"
REQUIRED = (TENSORS, CONFIG, OPTIMIZER, STATE)
"""The files that every manifest lists."""

PART = re.compile(r"([A-Za-z0-9_]+)\.part\.(msgpack|safetensors)")
"""Names of the files of a part, which a manifest lists if they exist; the first group is the name of the part."""

JSON_LIMIT = 1 << 26
"""Largest size of a manifest or a state, in bytes. Larger files are damaged, and are never written."""

MESSAGE_LIMIT = 300
"""Largest number of characters of an error in a message."""

DIRECTORY_NAME = re.compile(r"step-([0-9]{6,})")
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")

FORMAT = 1
"""Version of the checkpoint format."""


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of `MANIFEST.json`: version of the checkpoint format, and digests of all other files."""

    format: int
    files: tuple[FileDigest, ...]


class Snapshot(Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint to be written.

    parameters, optimizer: trees of evaluated arrays, nested or flat, never modified. parts: of attachments, by name.
    records: files for readers, by name, which no run reads.
    """

    parameters: Any
    optimizer: Any
    state: RunState
    adapter_config: AdapterConfig
    parts: Mapping[str, Part[object]] = {}
    records: dict[str, bytes] = {}


class Checkpoint(Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint that was read.

    parameters: a tree like the policy's. optimizer: flat, by dotted name. parts: of attachments, by name.
    """

    state: RunState
    parameters: Any
    optimizer: dict[str, mx.array]
    parts: Mapping[str, Part[msgspec.Raw]]


class LatestCheckpoint(Struct, frozen=True, kw_only=True):
    """Path of the newest complete checkpoint, None if there is none, and a warning for each newer damaged one."""

    path: Path | None = None
    warnings: tuple[str, ...] = ()


def write_checkpoint(
    directory: Path, snapshot: Snapshot, *, keep_last: int, kept: Callable[[], Collection[int]] = tuple
) -> Path:
    """Write `directory`/step-000050, then remove older checkpoints beyond `keep_last`; from any thread.

    kept: returns the steps of checkpoints that stay in any case; called after the checkpoint is written.
    A kill at any time leaves the earlier checkpoints, with or without the complete new one. Raises RunDirectoryError if
    a write fails, or CheckpointError if the state is larger than `read_state` accepts; the earlier checkpoints are then
    unchanged.
    """
    path = directory / _name(snapshot.state.step)
    state = msgspec.json.encode(snapshot.state)
    if len(state) > JSON_LIMIT:
        raise CheckpointError(
            f"checkpoint {path} cannot be written: {STATE} would have {len(state)} bytes, and the limit is "
            f"{JSON_LIMIT >> 20} MiB; earlier checkpoints are unchanged"
        )
    with disk_errors_as(
        RunDirectoryError, f"checkpoint {path} cannot be written, and earlier checkpoints are unchanged"
    ):
        make_directory(directory)
        with new_directory(path) as unfinished:
            files = fill_adapter(unfinished, snapshot.parameters, snapshot.adapter_config)
            files.append(write_tensors(unfinished / OPTIMIZER, named_arrays(snapshot.optimizer)))
            files.append(write_file(unfinished / STATE, [state]))
            files += [file for name, part in snapshot.parts.items() for file in _write_part(unfinished, name, part)]
            files += [write_file(unfinished / name, [contents]) for name, contents in snapshot.records.items()]
            manifest = Manifest(format=FORMAT, files=tuple(files))
            write_file(unfinished / MANIFEST, [msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"])
        prune(directory, keep_last, kept=kept())
    return path


def records_of(profile: str, metrics: Path, step: int) -> dict[str, bytes]:
    """The records of a checkpoint: the profile, and the line of the step in the metrics if there is one."""
    line = line_of_step(metrics, step)
    return {PROFILE: profile.encode(), **({METRICS: line + b"\n"} if line else {})}


def latest_checkpoint(directory: Path) -> LatestCheckpoint:
    """Find the newest checkpoint whose files all match the manifest; damaged checkpoints are skipped with a warning."""
    warnings: list[str] = []
    for path in _newest_first(directory):
        damage = find_damage(path)
        if damage is None:
            return LatestCheckpoint(path=path, warnings=tuple(warnings))
        warnings.append(f"checkpoint {path} is damaged and was skipped: {damage}")
    return LatestCheckpoint(path=None, warnings=tuple(warnings))


def read_state(path: Path) -> RunState:
    """Read the run state of a checkpoint without its tensors. Raises CheckpointError.

    The groups of the ledger must add up: each id that has ended was either trained on or discarded.
    """
    try:
        state = msgspec.json.decode(_read_json(path / STATE), type=RunState)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE} cannot be used: {visible(str(error), MESSAGE_LIMIT)}") from error
    ledger = state.ledger
    if ledger.ended != ledger.all_ended_below + len(set(ledger.ended_above)):
        raise CheckpointError(f"{path / STATE} cannot be used: its group accounting does not add up")
    return state


def record_newest(path: Path, step: int) -> None:
    """Record the step of the newest checkpoint outside the directory of checkpoints, atomically and durably.

    Step 0 removes the record: a run with nothing but its initial weights can start over without a loss. Raises
    RunDirectoryError if the disk refuses.
    """
    with disk_errors_as(RunDirectoryError, f"{path} cannot be written"):
        if step == 0:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, [f"{step}\n".encode()])


def recorded_newest(path: Path) -> int | None:
    """Return the step that `record_newest` recorded: None if there is no file, 0 if the file has no step."""
    if not path.exists():
        return None
    try:
        return max(0, int(path.read_bytes()[:20]))
    except (OSError, ValueError):
        return 0


def read_checkpoint(path: Path, *, expected: Any, adapter_config: AdapterConfig) -> Checkpoint:
    """Read a checkpoint for a policy with the trainable parameters `expected`, in a compute thread.

    Raises CheckpointError if a file does not match the manifest, or if the checkpoint belongs to another policy.
    """
    damage = find_damage(path)
    if damage is not None:
        raise CheckpointError(f"checkpoint {path} is damaged: {damage}")
    return Checkpoint(
        state=read_state(path),
        parameters=read_adapter(path, expected, adapter_config),
        optimizer=read_tensors(path / OPTIMIZER),
        parts=read_parts(path),
    )


def find_damage(directory: Path, *, sizes_only: bool = False) -> str | None:
    """Compare a checkpoint with its manifest. Return a description of the first difference, or None.

    The name of the directory must agree with the step in the state. sizes_only: compare the sizes of the files but do
    not read the files.
    """
    try:
        manifest = msgspec.json.decode(_read_json(directory / MANIFEST), type=Manifest)
        if manifest.format != FORMAT:
            return f"{MANIFEST} has format {manifest.format}; this program reads format {FORMAT}"
        if problem := _listing_problem(directory, [file.name for file in manifest.files]):
            return problem
        for file in manifest.files:
            path = directory / file.name
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
                return f"{file.name} does not match {MANIFEST}"
            if not sizes_only and digest_file(path) != file:
                return f"{file.name} does not match {MANIFEST}"
        step = read_state(directory).step
        if step != _step(directory):
            return f"{STATE} has step {step}: rename the directory to {_name(step)} if it is to be used"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError, RecursionError) as error:
        return f"{MANIFEST} or another file cannot be read: {visible(str(error), MESSAGE_LIMIT)}"
    return None


def _listing_problem(directory: Path, names: Sequence[str]) -> str | None:
    """Check which files a manifest lists: only files of the directory, and all that a resumed run reads."""
    for name in names:
        if not FILE_NAME.fullmatch(name):
            return f"{MANIFEST} lists '{visible(name, 80)}', which is not a file of the checkpoint"
    read = (*REQUIRED, *sorted(path.name for path in directory.iterdir() if PART.fullmatch(path.name)))
    missing = [name for name in read if name not in names]
    return f"{MANIFEST} does not list {', '.join(missing)}" if missing else None


def _read_json(path: Path) -> bytes:
    """Read a manifest or a state. Raises ValueError if the path is not a regular file of a reasonable size."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > JSON_LIMIT:
        raise ValueError(f"{path.name} is not a regular file of at most {JSON_LIMIT >> 20} MiB")
    return path.read_bytes()


def prune(directory: Path, keep_last: int, *, kept: Collection[int] = ()) -> None:
    """Keep the newest `keep_last` complete checkpoints; remove all others that are older than the newest complete one.

    kept: steps of checkpoints that stay in any case and do not count towards `keep_last`.
    Only the newest checkpoint is read completely; for the others only sizes are compared. The newest complete
    checkpoint is always kept.
    """
    newest = latest_checkpoint(directory).path
    if newest is None:
        return
    older = [path for path in _newest_first(directory) if _step(path) < _step(newest)]
    complete = [path for path in older if _step(path) not in kept and find_damage(path, sizes_only=True) is None]
    staying = set(complete[: keep_last - 1])
    for path in older:
        if path not in staying and _step(path) not in kept and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def require_same_inputs(state: RunState, inputs: Mapping[str, str]) -> None:
    """Compare the fingerprints of the inputs (model, tokenizer, dataset) with those at the start of the run.

    Raises CheckpointError with the name of every input that changed.
    """
    changed = sorted(name for name in state.inputs.keys() | inputs.keys() if state.inputs.get(name) != inputs.get(name))
    if changed:
        raise CheckpointError(f"cannot resume: inputs changed since the start of the run: {', '.join(changed)}")


def _write_part(directory: Path, name: str, part: Part[object]) -> list[FileDigest]:
    files = [write_file(directory / _part_file(name, "msgpack"), [msgspec.msgpack.encode(part.value)])]
    if part.arrays:
        files.append(write_tensors(directory / _part_file(name, "safetensors"), named_arrays(part.arrays)))
    return files


def read_parts(directory: Path, *, with_arrays: bool = True) -> dict[str, Part[msgspec.Raw]]:
    """Read the parts of a checkpoint by the names of their attachments. Raises CheckpointError."""
    found = (PART.fullmatch(path.name) for path in directory.iterdir())
    names = sorted({match[1] for match in found if match})
    parts = {}
    for name in names:
        value, arrays = directory / _part_file(name, "msgpack"), directory / _part_file(name, "safetensors")
        with disk_errors_as(CheckpointError, f"{value} cannot be used"):
            contents = msgspec.Raw(value.read_bytes())
        parts[name] = Part(value=contents, arrays=read_tensors(arrays) if with_arrays and arrays.exists() else {})
    return parts


def _part_file(name: str, kind: str) -> str:
    return f"{name}.part.{kind}"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return directory / _name(step)


def checkpoint_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints, complete or not, newest first."""
    return [_step(path) for path in _newest_first(directory)]


def _newest_first(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(
        (path for path in directory.iterdir() if DIRECTORY_NAME.fullmatch(path.name)), key=_step, reverse=True
    )


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
