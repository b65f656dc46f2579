"""The keys of a profile, and the flags that set them: the flag `--TABLE` is short for `--TABLE.type`."""

from __future__ import annotations

from clotho.settings.keys import TYPE, Keys
from training_run.profile import aliases
from training_run.profile.mounted import SETTINGS, absent_keys, with_attachments
from training_run.profile.other_trainers import advice, planned
from training_run.profile.schema import Profile

PROFILE_KEYS = Keys(
    with_attachments(Profile),
    mounted=SETTINGS,
    absent=absent_keys(),
    advice=advice,
    planned=planned,
    other_names=aliases.KEYS,
)

SECTIONS, KEYS = PROFILE_KEYS.sections, PROFILE_KEYS.all
"""All tables of a profile, and all keys, by path."""

SETTABLE, CHOICES = PROFILE_KEYS.settable, PROFILE_KEYS.choices
"""The keys that have a flag, by path, and the types of every union, by choice."""


def flag_of(path: str) -> str:
    """The flag that sets a key."""
    return "--" + path.removesuffix(f".{TYPE}").replace("_", "-")
