"""TOML files of an earlier system (mlx_parallm) as profiles."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from protocols.errors import ProfileError, visible
from training_run.profile.flags import parsed_flags
from training_run.profile.other_trainers import as_text
from training_run.profile.translation import Dialect, Given, Line

BASE, ATROPOS = "local-m3", "atropos"
"""The shipped profiles that imported profiles extend: without and with an Atropos API server."""

EARLIER = re.compile(r"^\s*\[rl_training\b", re.MULTILINE)
"""What only files of the earlier system contain."""

NULL_LINE = re.compile(r"^\s*[\w.-]+\s*=\s*null\s*(#.*)?$", re.MULTILINE)
"""A key without a value: the earlier system documents `null`, which is not valid TOML."""


class ImportedProfile(Struct, frozen=True, kw_only=True):
    """A converted TOML file.

    extends: the profile that it extends. settings: by key path. left: what is not carried over, one sentence each.
    """

    extends: str
    settings: dict[str, Any]
    left: tuple[str, ...]


def import_profile(text: str, label: str) -> ImportedProfile:
    """Convert the text of a TOML file; relative paths are relative to it. Raises ProfileError if it is not valid."""
    try:
        old = dict(_flat(tomllib.loads(NULL_LINE.sub("", text))))
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{label}: is not valid TOML: {visible(' '.join(str(error).split()), 200)}") from error
    given = [Given(flag=f"--{key}", values=(as_text(value),)) for key, value in old.items()]
    line = Line(given, given, Dialect(system="mlx_parallm"))
    words: list[str] = []
    left: list[str] = []
    for key, one in zip(old, given, strict=True):
        shown = f"{visible(key, 80)} = {visible(one.text, 60)}"
        if not (choices := line.choices(one)):
            left.append(f"{shown}: no earlier system documents it")
        elif one.name not in line.over:
            words += choices[0].words
            if not choices[0].words and not line.accepts(one, choices):
                left.append(f"{shown}: {choices[0].rows[0].note}")
    settings = parsed_flags(words, {})
    if adapter := settings.get("policy.adapter"):  # never a name of the hub
        settings["policy.adapter"] = os.path.join(".", os.path.expanduser(adapter))
    extends = ATROPOS if "atropos.url" in settings else BASE
    return ImportedProfile(extends=extends, settings=settings, left=tuple(left))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
