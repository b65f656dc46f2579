"""What clients save, in a directory that outlives the server: runs, their checkpoints, and how far they were trained.

    DIRECTORY/RUN/run.json                    the model of a client
    DIRECTORY/RUN/steps                       optimizer steps so far, to say what a killed server has lost
    DIRECTORY/RUN/weights/NAME/               state of training: state.safetensors, and the adapter of mlx-lm
    DIRECTORY/RUN/sampler_weights/NAME/       the adapter of mlx-lm
    DIRECTORY/.sessions/                      weights without a name, which end with their session
    .../NAME/checkpoint.json                  step, time, limit on its life

Checkpoints appear complete or not at all. All methods may be called from any thread.
"""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from attachments.tinker.bodies import LoraFields
from clotho.models.parameters import Arrays, Parameters, fingerprint, flat, nested
from clotho.serving.errors import ApiError
from clotho.storage.adapters import fill_adapter, read_adapter_config, unpad_ranks
from clotho.storage.atomic_files import (
    copy_file,
    make_directory,
    new_directory,
    remove_leftovers,
    replace_file,
    write_file,
)
from clotho.storage.tensors import read_tensors, write_tensors
from protocols.checkpoint import AdapterConfig
from protocols.errors import visible

T = TypeVar("T")
Kind = Literal["weights", "sampler_weights"]
SCHEME, SCRATCH = "tinker://", ".sessions"
PATH = re.compile(r"tinker://([A-Za-z0-9:_-]{1,128})/(weights|sampler_weights)/([A-Za-z0-9][A-Za-z0-9._-]{0,127})")
TYPES: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}


class SavedRun(Struct, frozen=True, kw_only=True):
    """One model of a client. owner: name of its API key; empty without one. created: seconds of the epoch."""

    model_id: str
    owner: str
    base_model: str
    lora: LoraFields
    created: float
    user_metadata: dict[str, Any] | None = None


class SavedCheckpoint(Struct, frozen=True, kw_only=True):
    """What is known of one checkpoint. step: of the optimizer. expires: seconds of the epoch; 0: never."""

    run: str
    kind: Kind
    name: str
    step: int
    created: float
    expires: float = 0.0
    user_metadata: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        """Its name for clients."""
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


class ModelWeights(Struct, frozen=True, kw_only=True, eq=False):
    """The weights of an adapter at one moment, evaluated. version: steps of the optimizer."""

    parameters: Parameters
    config: AdapterConfig
    fingerprint: str
    version: int

    @property
    def scales(self) -> dict[str, float]:
        """The scale of each layer."""
        settings = self.config.lora_parameters
        assert settings is not None
        names = (name for name in flat(self.parameters) if name.endswith(".lora_a"))
        return {name.removesuffix(".lora_a"): settings.scale for name in names}


def expiry(seconds: int | None) -> float:
    """Return when a checkpoint expires; 0 for None, which means never."""
    return 0.0 if seconds is None else time.time() + seconds


class TinkerStore:
    """The directory."""

    def __init__(self, root: Path) -> None:
        """Remove what a killed server has left half written. Raises OSError if the directory cannot be used."""
        self.root = root
        make_directory(root)
        shutil.rmtree(root / SCRATCH, ignore_errors=True)
        for run in _directories(root):
            for place in (run, *(run / kind for kind in TYPES)):
                remove_leftovers(place)

    def directory(self, model_id: str) -> Path:
        """Return the directory of a run."""
        return self.root / model_id.replace(":", "_")

    def place(self, checkpoint: SavedCheckpoint) -> Path:
        """Return the directory of a checkpoint."""
        return self.directory(checkpoint.run) / checkpoint.kind / checkpoint.name

    def add(self, run: SavedRun) -> None:
        """Record a run."""
        directory = self.directory(run.model_id)
        make_directory(directory)
        replace_file(directory / "run.json", [msgspec.json.encode(run)])

    def count(self, model_id: str, steps: int) -> None:
        """Note how far a run was trained; not synced, because it is only told."""
        (self.directory(model_id) / "steps").write_text(str(steps), encoding="utf-8")

    def runs(self, owner: str) -> list[SavedRun]:
        """Return the runs of an owner, the newest first; of all, for the empty name."""
        found = [_read(path / "run.json", SavedRun) for path in _directories(self.root)]
        mine = [run for run in found if run is not None and owner in ("", run.owner)]
        return sorted(mine, key=lambda run: run.created, reverse=True)

    def run(self, model_id: str, owner: str) -> SavedRun:
        """Return a run. Raises ApiError with status 404 if the owner has none of this name."""
        is_name = PATH.fullmatch(f"{SCHEME}{model_id}/weights/x")
        run = _read(self.directory(model_id) / "run.json", SavedRun) if is_name else None
        if run is None or owner not in ("", run.owner):
            raise ApiError(404, f"There is no training run {visible(model_id, 128)!r} of yours.", code="not_found")
        return run

    def left(self, model_id: str, owner: str) -> str:
        """Return what is left of a model that is not in memory any more. Raises ApiError with status 404."""
        self.run(model_id, owner)
        steps = _read(self.directory(model_id) / "steps", int) or 0
        saved = [one for one in self.checkpoints(model_id) if one.kind == "weights"]
        if not saved:
            return f"It was trained for {steps} steps, and its state was never saved."
        newest = max(saved, key=lambda one: one.step)
        return f"It was trained for {steps} steps; continue from {newest.path}, which has {newest.step}."

    def checkpoints(self, model_id: str) -> list[SavedCheckpoint]:
        """Return the checkpoints of a run, the oldest first."""
        places = [place for kind in TYPES for place in _directories(self.directory(model_id) / kind)]
        return sorted(filter(None, map(_checkpoint, places)), key=lambda one: one.created)

    def find(self, path: str, owner: str) -> SavedCheckpoint:
        """Return what a path names. Raises ApiError with status 404."""
        named, found = PATH.fullmatch(path), None
        if named is not None:
            with suppress(ApiError):
                found = _checkpoint(self.directory(self.run(named[1], owner).model_id) / named[2] / named[3])
        if found is None:
            raise ApiError(
                404, f"{visible(path, 200)!r} names no checkpoint of yours on this server.", code="not_found"
            )
        return found

    def refuse_taken(self, model_id: str, kind: Kind, name: str) -> None:
        """Raise ApiError if a run has a checkpoint of this name."""
        if _checkpoint(self.directory(model_id) / kind / name) is not None:
            raise ApiError(400, f"The name {name!r} is taken; choose another one, or set overwrite.", param="path")

    @contextmanager
    def _new(self, checkpoint: SavedCheckpoint) -> Iterator[Path]:
        """Yield the directory of a checkpoint, which takes the place of one of its name at the end of the block."""
        place = self.place(checkpoint)
        make_directory(place.parent)
        with new_directory(place) as unfinished:
            yield unfinished
            write_file(unfinished / "checkpoint.json", [msgspec.json.encode(checkpoint)])

    def write(self, checkpoint: SavedCheckpoint, weights: ModelWeights, state: Arrays | None = None) -> None:
        """Write a checkpoint. state: of training. Arrays are evaluated."""
        with self._new(checkpoint) as unfinished:
            fill_adapter(unfinished, weights.parameters, weights.config)
            if state is not None:
                write_tensors(unfinished / "state.safetensors", state)

    def copy(self, source: SavedCheckpoint, to: SavedRun) -> SavedCheckpoint:
        """Copy a checkpoint to a run."""
        self.add(to)
        copied = msgspec.structs.replace(source, run=to.model_id, created=time.time(), expires=0.0)
        with self._new(copied) as unfinished:
            for file in self.place(source).iterdir():
                if file.name != "checkpoint.json":
                    copy_file(file, unfinished / file.name)
        return copied

    def change(self, checkpoint: SavedCheckpoint) -> None:
        """Replace what is known of a checkpoint."""
        replace_file(self.place(checkpoint) / "checkpoint.json", [msgspec.json.encode(checkpoint)])

    def archive(self, checkpoint: SavedCheckpoint) -> bytes:
        """Return the files of the adapter as tar.gz; mlx-lm reads them from its directory."""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            for file in sorted(self.place(checkpoint).iterdir()):
                if file.name != "state.safetensors":
                    archive.add(file, arcname=file.name)
        return content.getvalue()

    def scratch(self, session_id: str) -> Path:
        """Return the directory of what belongs to a session, and ends with it."""
        return self.root / SCRATCH / session_id


def adapter_weights(place: Path, version: int) -> ModelWeights:
    """Read the weights of an adapter, in a compute thread. Raises CheckpointError."""
    config = read_adapter_config(place)
    arrays = unpad_ranks(read_tensors(place / "adapters.safetensors"), config)
    return ModelWeights(parameters=nested(arrays), config=config, fingerprint=fingerprint(arrays), version=version)


def _directories(place: Path) -> list[Path]:
    found = place.iterdir() if place.is_dir() else ()
    return sorted(path for path in found if path.is_dir() and not path.name.startswith("."))


def _read(path: Path, kind: type[T]) -> T | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def _checkpoint(place: Path) -> SavedCheckpoint | None:
    """Return what a directory holds; one that has expired is removed."""
    found = _read(place / "checkpoint.json", SavedCheckpoint)
    if found is None or not found.expires or found.expires > time.time():
        return found
    shutil.rmtree(place, ignore_errors=True)
    return None
