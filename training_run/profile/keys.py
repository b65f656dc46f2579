"""The keys of a profile, and the flags that set them: the flag `--TABLE` is short for `--TABLE.type`."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from clotho.settings.keys import TYPE, Keys
from training_run.profile import aliases
from training_run.profile.mounted import SETTINGS, absent_keys, with_attachments
from training_run.profile.other_words import ADVICE, PLANNED
from training_run.profile.schema import Profile

PROFILE_KEYS = Keys(
    with_attachments(Profile),
    mounted=SETTINGS,
    absent=absent_keys(),
    advice=ADVICE.first,
    planned=lambda key, value: PLANNED.first(key, value) or "",
    other_names=aliases.KEYS,
)

SECTIONS, KEYS = PROFILE_KEYS.sections, PROFILE_KEYS.all
"""All tables of a profile, and all keys, by path."""

SETTABLE, CHOICES = PROFILE_KEYS.settable, PROFILE_KEYS.choices
"""The keys that have a flag, by path, and the types of every union, by choice."""


def by_path(node: Any, whole: Container[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by key path. whole: paths of tables that are values."""
    if not isinstance(node, dict) or prefix in whole:
        return {prefix: node}
    start = prefix and f"{prefix}."
    parts = (by_path(child, whole, f"{start}{name}") for name, child in node.items())
    return {key: value for part in parts for key, value in part.items()}


def flag_of(path: str) -> str:
    """The flag that sets a key."""
    return "--" + path.removesuffix(f".{TYPE}").replace("_", "-")
