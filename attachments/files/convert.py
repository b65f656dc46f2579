"""The command `convert`: an adapter in another format, or a GGUF file as a model directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec
from msgspec.structs import replace
from rich.console import Console

from attachments.files.adapter_writers import WRITERS
from attachments.files.gguf import SUFFIX, open_gguf
from attachments.files.gguf_header import read_header
from attachments.files.gguf_tokenizer import gguf_tokenizer
from clotho.models.loading import PACKAGE, find_model
from clotho.models.parameters import flat
from clotho.storage.atomic_files import make_directory, new_directory, replaced_from_directory, write_file
from clotho.storage.tensors import write_tensors
from protocols.errors import ArtifactError, ProfileError, disk_errors_as
from training_run.adapters.contents import Adapter
from training_run.adapters.formats import DTYPES, LABELS, FormatName
from training_run.adapters.reading import read_adapter_of
from training_run.commands.command_line import CommandParser
from training_run.records.terminal_text import memory, print_line


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser(
        "convert",
        "Convert an adapter to another format, exactly; refuse what cannot be expressed. With --to mlx, a model in a "
        "GGUF file becomes a directory.",
    )
    found.add_argument(
        "source",
        metavar="SRC",
        type=Path,
        help="directory of an adapter, run or checkpoint; GGUF file",
    )
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
    source = arguments.source.expanduser()
    if is_model(source):
        if arguments.to != "mlx" or arguments.model or arguments.base_name:
            raise ProfileError(f"convert: {source} is a model: convert it with --to mlx, without other flags")
        convert_model(str(source), arguments.destination.expanduser())
        print_line(console, f"wrote    {arguments.destination} (mlx), a model")
        return 0
    destination = arguments.destination.expanduser()
    try:
        adapter = convert(source, destination, arguments.to, model=arguments.model, base_name=arguments.base_name)
    except ArtifactError as error:
        if error.reason == "unreadable":
            raise ArtifactError(f"{error}; mlx_lm.convert converts models", reason=error.reason) from error
        raise
    for line in summary(adapter, arguments.destination, arguments.to):
        print_line(console, line)
    return 0


def summary(adapter: Adapter, destination: Path, to: FormatName) -> Iterator[str]:
    """Return the lines that describe a conversion."""
    kinds = ", ".join(sorted({dtype.lower() for dtype in adapter.dtypes.values()}))
    ranks = ", ".join(map(str, sorted(set(adapter.ranks.values()))))
    scales = ", ".join(f"{scale:.6g}" for scale in sorted(set(adapter.scales.values())))
    what = f"{LABELS[adapter.method]}, {len(adapter.ranks)} layers"
    yield f"read     {adapter.path} ({adapter.format}): {what}, rank {ranks}, scale {scales}, {kinds}"
    base = adapter.base_name or "unknown"
    yield f"base     {base}{'' if adapter.base else ' (not compared with the adapter: not on this machine)'}"
    size = sum(array.size * DTYPES[adapter.dtypes[name]] for name, array in adapter.arrays.items())
    yield f"wrote    {destination} ({to}), {memory(size)}"


def convert(source: Path, destination: Path, to: FormatName, *, model: str = "", base_name: str = "") -> Adapter:
    """Write the adapter at `source` to `destination`, and return it.

    model: the base model, see `read_adapter_of`. base_name: name of the base model in the new configuration. The
    destination appears complete, and must not exist. Raises ArtifactError, AdapterRequestError or ModelError.
    """
    require_new(destination)
    require_suffix(destination, to)
    adapter = read_adapter_of(source, model)
    named = replace(adapter, base_name=base_name or adapter.base_name or model)
    write_new(destination, lambda path: WRITERS[to](path, named), is_file=to == "gguf")
    return named


def is_model(source: Path) -> bool:
    """Whether a path is a GGUF file with a model, not with an adapter. Raises ModelError for a damaged file."""
    if str(source).startswith(PACKAGE):
        return True
    is_file = source.suffix.lower() == SUFFIX and source.is_file()
    return is_file and read_header(source).metadata.get("general.type") != "adapter"


def convert_model(model: str, directory: Path) -> None:
    """Write configuration, weights and tokenizer of a GGUF file to a new directory, for mlx-lm and environments.

    The weights keep their values and quantization, so an adapter of the file suits the directory. model: a value of
    `model.path` that names a GGUF file. The directory appears complete, and must not exist. Raises ArtifactError or
    ModelError.
    """
    require_new(directory)
    file = find_model(model)
    network, config = open_gguf(file)
    tokenizer = gguf_tokenizer(file)
    config |= {"eos_token_id": sorted(tokenizer.eos_token_ids)}

    def write(path: Path) -> None:
        write_tensors(path / "model.safetensors", flat(network.parameters()))
        write_file(path / "config.json", [msgspec.json.format(msgspec.json.encode(config), indent=2)])
        tokenizer.save_pretrained(str(path))

    write_new(directory, write)


def require_new(destination: Path) -> None:
    """Raise ArtifactError if a path exists."""
    if destination.exists() or destination.is_symlink():
        raise ArtifactError(f"{destination} exists: choose a new path", reason="exists")


def require_suffix(destination: Path, form: str) -> None:
    """Raise ArtifactError unless a path has the suffix of the format."""
    if (form == "gguf") != (destination.suffix == ".gguf"):
        raise ArtifactError(
            f"{destination}: the format gguf is a file with the suffix .gguf, the others are directories",
            reason="unwritable",
        )


def write_new(destination: Path, write: Callable[[Path], object], *, is_file: bool = False) -> None:
    """Let a function write a new directory or file, which appears complete. Raises ArtifactError if a write fails."""
    with disk_errors_as(partial(ArtifactError, reason="unwritable"), f"{destination} cannot be written"):
        make_directory(destination.absolute().parent)
        if is_file:
            with replaced_from_directory(destination) as unfinished:
                write(unfinished / destination.name)
        else:
            with new_directory(destination) as unfinished:
                write(unfinished)
