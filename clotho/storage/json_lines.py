"""Line-by-line histories (metrics, rollouts) brought back to where a checkpoint stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from clotho.storage.atomic_files import replace_file
from protocols.errors import RunDirectoryError


class _Line(Struct):
    """All that matters of a line; one without a step belongs to no step and stays."""

    step: int | None = None


def truncate_after(path: Path, step: int) -> None:
    """Keep the lines whose `step` is at most `step`, in one atomic rewrite; a file that does not exist stays so.

    The last line may be torn by a kill and is then dropped. Raises `RunDirectoryError` if any other is not JSON.
    """
    if not path.exists():
        return
    try:
        replace_file(path, _kept(path, step))
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be rewritten: {error.strerror or error}") from error


def _kept(path: Path, step: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                found = msgspec.json.decode(line, type=_Line).step
            except msgspec.MsgspecError as error:
                raise RunDirectoryError(f"{path}:{number}: not a line of this program: {error}") from error
            if found is None or found <= step:
                yield line
