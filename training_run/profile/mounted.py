"""The settings of this installation's attachments, and the structs of a profile with them."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import Struct

from clotho.extension import attachment_modules
from clotho.settings.mounted import Setting, mount
from training_run.profile.schema import Profile

P = TypeVar("P", bound=Struct)

ATTACHED = {
    "agent": "agents",
    "atropos": "atropos",
    "cluster": "cluster",
    "collapse_detection": "alarms",
    "critic": "critic",
    "data.curriculum": "curriculum",
    "data.reasoning_gym": "reasoning_gym",
    "data.verifiers": "verifiers",
    "distillation": "distillation",
    "distributed": "ranks",
    "engine.speculation": "speculation",
    "environments": "atropos",
    "generator": "remote",
    "monitor.token_values_mb": "dashboard",
    "preference": "preference",
    "replay": "replay",
    "restarts": "restarts",
    "server.accept_weights": "remote",
    "server.allow_pause": "dialects",
    "server.api_keys_file": "keys",
    "server.reasoning_parser": "tools",
    "server.tinker": "tinker",
    "server.tool_parser": "tools",
    "server.weights_root": "remote",
    "sessions": "sessions",
    "sft": "sft",
    "stage": "stages",
    "stages": "stages",
    "trackers": "trackers",
}
"""The attachment of each key that an attachment adds to a profile: a key of an absent one is refused by its name."""

SETTINGS: tuple[Setting[Any], ...] = tuple(
    setting for module in attachment_modules("sections") for setting in module.SETTINGS
)
"""The settings of the attachments that are installed."""


def with_attachments(kind: type[P], table: str = "") -> type[P]:
    """Return a struct of tables of a profile, or the struct of one table, with the settings of attachments."""
    return mount(kind, SETTINGS, table)


def unused_by(command: str) -> set[str]:
    """Return the paths of the settings of attachments that a command does without."""
    return {setting.path for setting in SETTINGS if command in setting.unused_by}


def used_by(command: str) -> set[str]:
    """Return the tables of attachments that a command needs beside those of the program."""
    return {setting.path for setting in SETTINGS if command in setting.used_by}


def left_out(profile: Profile, command: str) -> Profile:
    """Return the profile with the defaults of the sections that a command does without."""
    for setting in SETTINGS:
        if command in setting.unused_by and not setting.table:
            profile = setting.put(profile, setting.default)
    return profile


def absent_keys() -> dict[str, str]:
    """Return the keys of `ATTACHED` whose attachment is not installed."""
    there = {setting.path for setting in SETTINGS}
    return {key: attachment for key, attachment in ATTACHED.items() if key not in there}
