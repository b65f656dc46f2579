"""The command lines of the commands that work on artifacts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from protocols.errors import ProfileError, visible
from training_run.profile.program import program
from training_run.profile.translation import Dialect, Given, announce_words, split, translate


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are a ProfileError. In flags, `-` and `_` are equal, as in flags of runs."""

    def __init__(self, command: str, description: str) -> None:
        """command: the word after the name of the program."""
        super().__init__(prog=f"{program()} {command}", description=description, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", action="store_true", help="show this text")
        self.command = command

    def error(self, message: str) -> NoReturn:
        """Raise ProfileError."""
        raise ProfileError(f"{self.command}: {visible(message, 300)}; see {self.command} --help")

    def parsed(self, argv: Sequence[str], console: Console) -> argparse.Namespace | None:
        """Parse the arguments after the command. Raises ProfileError; returns None after it has printed the help."""
        if {"-h", "--help"} & set(argv):
            console.print(self.format_help(), markup=False, highlight=False, soft_wrap=True, end="")
            return None
        words = []
        for word in argv:
            flag, equals, value = word.partition("=")
            words.append(flag.replace("_", "-") + equals + value if word.startswith("--") else word)
        if not all(map(self._is_valid, split(words))):
            dialect = Dialect(command=self.command, own=self._is_valid, problem=lambda words: "")
            translation = translate(words, dialect)
            announce_words(translation.changed)
            words = list(translation.words)
        return self.parse_args(words)

    def _is_valid(self, one: Given) -> bool:
        """Whether a flag exists, and its value is one of the choices if there are choices."""
        if (action := self._option_string_actions.get(one.flag)) is None:
            return not one.flag
        return not action.choices or one.values[:1] == () or one.values[0] in action.choices


def new_file(text: str) -> Path:
    """Return the path of a new file. Raises ProfileError if it exists, or its directory does not exist."""
    path = Path(text).expanduser()
    if path.exists() or not path.parent.is_dir():
        why = "exists already" if path.exists() else "is in a directory that does not exist"
        raise ProfileError(f"{visible(str(path), 200)} {why}: name a new file")
    return path
