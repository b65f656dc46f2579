"""The keys of a profile, and the flags that set them: the flag `--TABLE` is short for `--TABLE.type`."""

from __future__ import annotations

from clotho.settings.keys import TYPE, Key, Keys
from training_run.profile.other_trainers import advice, planned
from training_run.profile.schema import Profile

PROFILE_KEYS = Keys(Profile, advice=advice, planned=planned)

SECTIONS, KEYS = PROFILE_KEYS.sections, PROFILE_KEYS.all
"""All tables of a profile, and all keys, by path."""

SETTABLE, CHOICES = PROFILE_KEYS.settable, PROFILE_KEYS.choices
"""The keys that have a flag, by path, and the types of every union, by choice."""


def flag_key(name: str) -> Key | None:
    """The key that a flag sets. name: the flag without leading dashes, which is the path of a key or of a union."""
    return SETTABLE.get(name) or SETTABLE.get(f"{name}.{TYPE}")


def flag_of(path: str) -> str:
    """The flag that sets a key."""
    return "--" + path.removesuffix(f".{TYPE}").replace("_", "-")
