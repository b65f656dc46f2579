"""The command `convert`: an adapter in another format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from msgspec.structs import replace
from rich.console import Console

from clotho.artifacts.adapter_writers import WRITERS
from clotho.artifacts.adapters import Adapter, read_adapter_of
from clotho.commands.command_line import CommandParser
from clotho.models.adapter_formats import FormatName
from clotho.monitoring.display import print_line
from clotho.monitoring.terminal_text import memory
from clotho.storage.atomic_files import make_directory, new_directory, replaced_from_directory
from protocols.errors import ArtifactError


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser("convert", "Convert an adapter to another format, exactly; refuse what cannot be expressed.")
    found.add_argument("source", metavar="SRC", type=Path, help="directory of an adapter, run or checkpoint; GGUF file")
    found.add_argument("destination", metavar="DST", type=Path, help="new directory; with --to gguf a new file *.gguf")
    found.add_argument("--to", required=True, choices=get_args(FormatName), help="format to write")
    found.add_argument("--model", default="", help="base model; default: the one that the adapter names, if it is here")
    found.add_argument(
        "--base-name", default="", metavar="NAME", help="name of the base model in the new configuration, for the hub"
    )
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Convert an adapter; return the exit status."""
    arguments = parser().parsed(argv, console)
    if arguments is None:
        return 0
    adapter = convert(
        arguments.source.expanduser(),
        arguments.destination.expanduser(),
        arguments.to,
        model=arguments.model,
        base_name=arguments.base_name,
    )
    for line in summary(adapter, arguments.destination, arguments.to):
        print_line(console, line)
    return 0


def summary(adapter: Adapter, destination: Path, to: FormatName) -> Iterator[str]:
    """Return the lines that describe a conversion."""
    kinds = ", ".join(sorted({dtype.lower() for dtype in adapter.dtypes.values()}))
    ranks = ", ".join(map(str, sorted(set(adapter.ranks.values()))))
    scales = ", ".join(f"{scale:.6g}" for scale in sorted(set(adapter.scales.values())))
    method = "DoRA" if adapter.is_dora else "LoRA"
    layers = f"{len(adapter.ranks)} layers"
    yield f"read     {adapter.path} ({adapter.format}): {method}, {layers}, rank {ranks}, scale {scales}, {kinds}"
    base = adapter.base_name or "unknown"
    yield f"base     {base}{'' if adapter.base else ' (not compared with the adapter: not on this machine)'}"
    yield f"wrote    {destination} ({to}), {memory(adapter.bytes)}"


def convert(source: Path, destination: Path, to: FormatName, *, model: str = "", base_name: str = "") -> Adapter:
    """Write the adapter at `source` to `destination`, and return it.

    model: the base model, see `read_adapter_of`. base_name: name of the base model in the new configuration. The
    destination appears complete, and must not exist. Raises ArtifactError, AdapterRequestError or ModelError.
    """
    require_new(destination)
    if (to == "gguf") != (destination.suffix == ".gguf"):
        raise ArtifactError(
            f"{destination}: the format gguf is a file with the suffix .gguf, the others are directories",
            reason="unwritable",
        )
    adapter = read_adapter_of(source, model)
    named = replace(adapter, base_name=base_name or adapter.base_name or model)
    write_new(destination, lambda path: WRITERS[to](path, named), is_file=to == "gguf")
    return named


def require_new(destination: Path) -> None:
    """Raise ArtifactError if a path exists."""
    if destination.exists() or destination.is_symlink():
        raise ArtifactError(f"{destination} exists: choose a new path", reason="exists")


def write_new(destination: Path, write: Callable[[Path], object], *, is_file: bool = False) -> None:
    """Let a function write a new directory or file, which appears complete. Raises ArtifactError if a write fails."""
    try:
        make_directory(destination.absolute().parent)
        if is_file:
            with replaced_from_directory(destination) as unfinished:
                write(unfinished / destination.name)
        else:
            with new_directory(destination) as unfinished:
                write(unfinished)
    except OSError as error:
        message = f"{destination} cannot be written: {error.strerror or error}"
        raise ArtifactError(message, reason="unwritable") from error
