"""The command lines of the commands that work on artifacts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from protocols.errors import ProfileError, visible
from training_run.profile.flags import understood
from training_run.profile.program import program


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
        return understood(words, self.parse_args, command=self.command, own=self._is_valid)

    def _is_valid(self, flag: str, values: Sequence[str]) -> bool:
        """Whether a flag exists, and its value is one of the choices if there are choices."""
        action = self._option_string_actions.get(flag)
        return action is not None and (not action.choices or not values or values[0] in action.choices)


def new_file(text: str) -> Path:
    """Return the path of a new file. Raises ProfileError if it exists, or its directory does not exist."""
    path = Path(text).expanduser()
    if path.exists() or not path.parent.is_dir():
        why = "exists already" if path.exists() else "is in a directory that does not exist"
        raise ProfileError(f"{visible(str(path), 200)} {why}: name a new file")
    return path
