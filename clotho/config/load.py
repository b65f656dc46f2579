"""Profiles on disk: load one with everything that stands on it, and write it down resolved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from clotho.config.dependencies import resting
from clotho.config.layers import Layer, file_layers, merge, override_layer, profile_path
from clotho.config.preset_layers import with_recipes
from clotho.config.profile_decode import decode
from clotho.config.rules import validate
from clotho.config.schema import Profile
from clotho.storage.atomic_files import UNFINISHED, sync_directory

MASK = "********"


def load_profile(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Profile:
    """Read a profile and put `overrides` (by key path: `learner.learning_rate`) on top.

    name_or_path: a shipped profile's name, or a path to a .toml. `extends = "name"` in a file puts it on top of
    another profile. `{profile}` in run_dir becomes the file's stem. The choice of an objective or a correction brings
    its recipe along. A setting that a higher layer deprives of its effect falls back to its default, and with it what
    depends on it: `--async false` works on top of any profile. Raises ProfileError on one line.
    """
    path = profile_path(name_or_path)
    layers: list[Layer] = file_layers(path)
    if overrides:
        layers.append(override_layer(overrides))
    merged = merge(with_recipes(layers))
    profile = decode(merged)
    while asleep := resting(profile, merged):
        merged = merged.without(asleep)
        profile = decode(merged)
    validate(profile, merged.label)
    return msgspec.structs.replace(profile, run_dir=profile.run_dir.replace("{profile}", path.stem))


def resolved_toml(profile: Profile, *, mask_secrets: bool = False) -> str:
    """The whole profile as TOML; loading it gives an equal profile. mask_secrets: hide the API key."""
    tree = _without_none(msgspec.to_builtins(profile))
    if mask_secrets and profile.gateway.api_key:
        tree["gateway"]["api_key"] = MASK
    return tomli_w.dumps(tree)


def write_profile(profile: Profile, path: Path) -> None:
    """Write the resolved profile, whole or not at all; readable by its owner only where it holds an API key."""
    scratch = path.with_name(f".{path.name}{UNFINISHED}{os.getpid()}")
    mode = 0o600 if profile.gateway.api_key else 0o644
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(resolved_toml(profile))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _without_none(value: Any) -> Any:
    """TOML has no null; every None of a profile is a default."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
