"""Words of other programs on command lines and in profiles, as far as an attachment knows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct

from clotho.extension import Door

YAML = (".yaml", ".yml")
"""The ends of the names of files of other programs."""

IsOwn = Callable[[str, Sequence[str]], bool]
"""Whether a command has a flag, and the flag takes these values."""

Problem = Callable[[Sequence[str]], str]
"""Why words of a command line are not valid; empty if they are."""

ADVICE: Door[[str, Callable[[str], str]], str | None] = Door("attachment.advice")
"""Returns the end of a message that names the key to use; None if no other program has the name.

The second argument writes a key.
"""

PLANNED: Door[[str, str], str | None] = Door("attachment.planned")
"""Returns the end of the message about a value of a key that is planned."""

ACCEPTED: Door[[], Collection[str]] = Door("attachment.accepted")
"""Returns the names of other programs that are accepted as flags."""

TRANSLATE: Door[[Sequence[str], str, IsOwn, Problem], Sequence[str] | None] = Door("attachment.translated")
"""Returns a command line of a command, empty for a run, in words of its own; None if no word is replaced.

Raises ProfileError that names every flag of another program that cannot be replaced.
"""

REPLACED_PROGRAM: Door[[Sequence[str], Problem], Sequence[str] | None] = Door("attachment.replaced_program")
"""Returns the command line of another program in words of its own; None for any other command line.

The second argument is for the flags of a run. Raises ProfileError.
"""


class ImportedProfile(Struct, frozen=True, kw_only=True):
    """A file of another program.

    extends: the profile that it extends. settings: by key path. left: what is not carried over, one sentence each.
    """

    extends: str
    settings: Mapping[str, Any]
    left: tuple[str, ...]


IMPORTED: Door[[str, str], ImportedProfile | None] = Door("attachment.imported")
"""Converts the text of a file with this name; None if it is a profile. Raises ProfileError."""
