"""The command lines in the documents of mlx-lm and of the earlier systems, read from `earlier_command_lines.toml`."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

from msgspec import Struct, convert


class Documented(Struct, frozen=True, kw_only=True):
    """A command line of a document; the TOML file describes the fields."""

    text: str
    system: str = ""
    part: bool = False
    refused: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The words, as a shell reads them."""
        return shlex.split(self.text.replace("\\\n", " "), comments=True)

    @property
    def flags(self) -> list[str]:
        """The words from the first flag."""
        return self.words[next(number for number, word in enumerate(self.words) if word.startswith("--")) :]


LINES = convert(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["line"], list[Documented]
)
