"""What a run reads, recognised again when it is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

SAMPLE_BYTES = 65_536
WEIGHTS = ("*.safetensors", "config.json")
TOKENIZER = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


def model_fingerprint(directory: Path) -> str:
    """Of configuration and weights. Of a large file: its size, beginning and end, so that it takes no time."""
    return _fingerprint(_matching(directory, WEIGHTS))


def tokenizer_fingerprint(directory: Path) -> str:
    """Of vocabulary, merges and chat template."""
    return _fingerprint(_matching(directory, TOKENIZER), whole=True)


def dataset_fingerprint(*paths: Path) -> str:
    """Of the problems' files, every byte, in the order given; where they lie does not matter."""
    return _fingerprint(paths, whole=True, named=False)


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def _fingerprint(paths: Iterable[Path], *, whole: bool = False, named: bool = True) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name if named else ''} {size}\n".encode())
        with path.open("rb") as file:
            if whole or size <= 2 * SAMPLE_BYTES:
                digest.update(file.read())
                continue
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(size - SAMPLE_BYTES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
