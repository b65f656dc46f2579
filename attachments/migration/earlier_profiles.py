"""Files of other trainers as profiles: TOML of mlx_parallm and YAML of mlx_lm.lora."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from typing import Any

from attachments.migration.other_trainers import SYSTEMS, VALUE, as_text
from attachments.migration.translation import Dialect, Given, Line
from protocols.errors import ProfileError, visible
from training_run.profile.flags import parsed_flags
from training_run.profile.keys import by_path
from training_run.profile.other_words import YAML, ImportedProfile

BASES, ATROPOS = {"mlx_parallm": "local-m3", "mlx_lm": "qwen3-m3"}, "atropos"
"""The shipped profiles that imported profiles extend: by system, and with an Atropos API server."""

NULL_LINE = re.compile(r"^\s*[\w.-]+\s*=\s*null\s*(#.*)?$", re.MULTILINE)
"""A key without a value: the earlier system documents `null`, which is not valid TOML."""


def import_profile(text: str, label: str) -> ImportedProfile:
    """Convert the text of a file; relative paths are relative to it. Raises ProfileError if it is not valid.

    label: the name of the file, of which the end says whether it is YAML.
    """
    system = "mlx_lm" if label.endswith(YAML) else "mlx_parallm"
    old = _read_yaml(text, label) if system == "mlx_lm" else _read_toml(text, label)
    given = [Given(flag=f"--{key}", values=(as_text(value),)) for key, value in old.items()]
    line = Line(given, given, Dialect(system=system))
    words: list[str] = []
    left: list[str] = []
    for key, one in zip(old, given, strict=True):
        shown = f"{visible(key, 80)} = {visible(one.text, 60)}"
        if not (choices := line.choices(one)):
            left.append(f"{shown}: {SYSTEMS[system]} does not document it")
        elif one.name not in line.over:
            known = choices[0].words if VALUE not in choices[0].words else ()
            words += known
            if not known and not line.accepts(one, choices):
                use = f"use {shlex.join(choices[0].words)}; " if choices[0].words else ""
                left.append(f"{shown}: {use}{choices[0].rows[0].note}")
    settings = parsed_flags(words, {})
    if adapter := settings.get("policy.adapter"):  # never a name of the hub
        settings["policy.adapter"] = os.path.join(".", os.path.expanduser(adapter))
    extends = ATROPOS if "atropos.url" in settings else BASES[system]
    return ImportedProfile(extends=extends, settings=settings, left=tuple(left))


def _read_toml(text: str, label: str) -> dict[str, Any]:
    try:
        return by_path(tomllib.loads(NULL_LINE.sub("", text)))
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{label}: is not valid TOML: {visible(' '.join(str(error).split()), 200)}") from error


def _read_yaml(text: str, label: str) -> dict[str, Any]:
    """Keys without a value are left out. An alias is refused, because a few of them can stand for terabytes."""
    import yaml  # a dependency of mlx-lm, which few command lines need

    try:
        aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        table = {} if aliases else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ProfileError(f"{label}: is not valid YAML: {visible(' '.join(str(error).split()), 200)}") from error
    if aliases:
        raise ProfileError(f"{label}: contains an alias (*NAME): write its value")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
        raise ProfileError(f"{label}: must have keys of mlx_lm.lora, such as `model: PATH`")
    return {name: value for name, value in by_path(table).items() if value is not None}
