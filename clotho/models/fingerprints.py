"""Fingerprints of the files of a model and of a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

SAMPLE_BYTES = 65_536


GGUF_HEADER_BYTES = 32 * 2**20
"""Larger than the header of any model in use: vocabulary and merges have at most about 15 MB."""


WEIGHT_FILES = ("*.safetensors", "config.json")


TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


def model_fingerprint(model: Path) -> str:
    """Return a fingerprint of configuration and weights of a directory, or of a GGUF file.

    Of a large file only size, beginning and end are read.
    """
    if not model.is_dir():
        return _fingerprint([model], with_names=False)
    return _fingerprint(_matching(model, WEIGHT_FILES))


def tokenizer_fingerprint(model: Path, chat_template: str = "") -> str:
    """Return a fingerprint of vocabulary, merges and chat template of a directory.

    For a GGUF file, which begins with them, it is a fingerprint of its first bytes. chat_template: file of a template
    that replaces the model's.
    """
    replaced = [Path(chat_template).expanduser()] if chat_template else []
    if model.is_dir():
        return _fingerprint([*_matching(model, TOKENIZER_FILES), *replaced], whole=True)
    with model.open("rb") as file:
        header = hashlib.sha256(file.read(GGUF_HEADER_BYTES)).hexdigest()[:16]
    return f"{header}-{_fingerprint(replaced, whole=True)}" if replaced else header


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def _fingerprint(paths: Iterable[Path], *, whole: bool = False, with_names: bool = True) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name if with_names else ''} {size}\n".encode())
        with path.open("rb") as file:
            if whole or size <= 2 * SAMPLE_BYTES:
                digest.update(file.read())
                continue
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(size - SAMPLE_BYTES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
