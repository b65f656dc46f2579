"""MANIFEST.json: the last file of a checkpoint to be written, and the proof that all the others are whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from clotho.storage.atomic_files import FileDigest, digest_file, write_file

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
