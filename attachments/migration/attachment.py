"""What a command line and a profile ask about words of other trainers, and the command that converts their files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from training_run.profile.other_words import YAML

if TYPE_CHECKING:
    from training_run.profile.other_words import ImportedProfile, IsOwn, Problem

COMMANDS: Mapping[str, str] = {"import-profile": "attachments.migration.migration"}

EARLIER = re.compile(r"^\s*\[rl_training\b", re.MULTILINE)
"""What only files of the earlier system contain."""


def advice(name: str, spelled: Callable[[str], str]) -> str | None:
    """Return what replaces a name of another trainer."""
    from attachments.migration import other_trainers

    return other_trainers.advice(name, spelled)


def planned(key: str, value: str) -> str | None:
    """Return the end of the message about a value that is planned."""
    from attachments.migration import other_trainers

    return other_trainers.planned(key, value)


def accepted() -> Collection[str]:
    """Return the flags of other trainers that are accepted."""
    from attachments.migration import other_trainers

    return other_trainers.accepted()


def translated(argv: Sequence[str], command: str, own: IsOwn, problem: Problem) -> Sequence[str] | None:
    """Return a command line whose flags of other trainers are replaced, and announce the words that replace them."""
    from attachments.migration.translation import Dialect, translate
    from training_run.profile.program import announce_words

    found = translate(argv, Dialect(command=command, own=lambda one: own(one.flag, one.values), problem=problem))
    if found.words == tuple(argv):
        return None
    announce_words(found.changed)
    return found.words


def replaced_program(argv: Sequence[str], problem: Problem) -> Sequence[str] | None:
    """Return the command line of an earlier program in the words of Clotho."""
    from attachments.migration import translation

    return translation.replaced_program(argv, problem)


def imported(text: str, label: str) -> ImportedProfile | None:
    """Convert a file of another trainer."""
    if not (label.endswith(YAML) or EARLIER.search(text)):
        return None
    from attachments.migration.earlier_profiles import import_profile

    return import_profile(text, label)
