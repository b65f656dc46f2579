"""Convert a GGUF file to a model directory: `python -m clotho.commands.convert_gguf MODEL DIRECTORY`.

mlx-lm and Atropos environments read models and tokenizers from directories only. The weights keep their values and
quantization, so an adapter of the GGUF file suits the directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from clotho.cpu import load_blas
from clotho.storage.atomic_files import make_directory, new_directory, write_file
from protocols.errors import ClothoError, ModelError


def convert(model: str, directory: Path) -> None:
    """Write configuration, weights and tokenizer of a GGUF file to a new directory.

    model: a value of `model.path` that names a GGUF file. The directory appears complete. Raises ModelError if the file
    cannot be read, or the directory exists or cannot be written.
    """
    from clotho.models.gguf import open_gguf
    from clotho.models.gguf_tokenizer import gguf_tokenizer
    from clotho.models.loading import find_model
    from clotho.models.parameters import flat
    from clotho.storage.tensors import write_tensors

    file = find_model(model)
    if file.is_dir():
        raise ModelError(f"model {model} is a directory already")
    if directory.exists():
        raise ModelError(f"{directory} exists: choose a new directory")
    network, config = open_gguf(file)
    tokenizer = gguf_tokenizer(file)
    config |= {"eos_token_id": sorted(tokenizer.eos_token_ids)}
    try:
        make_directory(directory.absolute().parent)
        with new_directory(directory) as unfinished:
            write_tensors(unfinished / "model.safetensors", flat(network.parameters()))
            write_file(unfinished / "config.json", [msgspec.json.format(msgspec.json.encode(config), indent=2)])
            tokenizer.save_pretrained(str(unfinished))
    except OSError as error:
        raise ModelError(f"{directory} cannot be written: {error.strerror or error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Convert the model that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m clotho.commands.convert_gguf", description=__doc__)
    parser.add_argument("model", help="a GGUF file, or package:NAME/FILE")
    parser.add_argument("directory", type=Path, help="directory to write; must not exist")
    arguments = parser.parse_args(argv)
    load_blas()
    try:
        convert(arguments.model, arguments.directory)
    except ClothoError as error:
        sys.stderr.write(f"clotho: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
