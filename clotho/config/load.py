"""Profiles on disk: load a profile with the layers below it, and write the resolved profile.

Errors name the file, the key, the allowed values and the value found.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from clotho.config.keys import REQUIRED, TYPE, choices, chosen_types, keys, settable, why_unavailable
from clotho.config.layers import Layer, Merged, file_layers, merge, override_layer, profile_path
from clotho.config.nearest import nearest
from clotho.config.rules import first_complaint
from clotho.config.schema import Profile
from clotho.storage.atomic_files import UNFINISHED, sync_directory
from protocols.errors import ProfileError


def decode(merged: Merged) -> Profile:
    """Build the profile. Raises ProfileError for a setting that is missing, unavailable or not allowed."""
    for path in sorted(merged.values.keys() & choices().keys(), key=len):
        if merged.values[path] not in choices()[path]:
            raise ProfileError(f"{merged.label(path)}: {_wrong_type(path, merged.values[path])}")
    chosen = chosen_types(merged.values)
    for path, value in merged.values.items():
        if path in keys() and (why := why_unavailable(path, merged.values)) is not None:
            raise ProfileError(f"{merged.label(path)}: {why}")
        if not finite(value):
            raise ProfileError(f"{merged.label(path)}: {path} must be finite, not {shown(value)}")
    tree: dict[str, Any] = {}
    for path, key in settable().items():
        variant = next((variant for variant in key.variants if variant.types.items() <= chosen.items()), None)
        value = merged.values.get(path, variant.default if variant else None)
        if value is REQUIRED:
            what = f"[[{path}]]" if key.item == "tables" else path
            raise ProfileError(f"{merged.label(path.rpartition('.')[0])}: {what} is missing: {key.help}")
        if value is not None:
            *tables, name = path.split(".")
            reduce(lambda table, part: table.setdefault(part, {}), tables, tree)[name] = value
    try:
        return msgspec.convert(tree, Profile)
    except msgspec.ValidationError as error:
        raise ProfileError(_explain(error, merged, tree)) from error


def _wrong_type(path: str, value: object) -> str:
    allowed = choices()[path]
    guess = nearest(value, allowed) if isinstance(value, str) else None
    more = ", or module:function" if path == "learner.objective.type" else ""
    return f"{path.removesuffix(f'.{TYPE}')} must be one of {', '.join(allowed)}{more}, not {shown(value)}" + (
        f"; did you mean {guess}?" if guess else ""
    )


def shown(value: object) -> str:
    """A value for a message, in the form of TOML, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def finite(value: object) -> bool:
    """Whether every float in a value is finite; TOML allows `inf` and `nan`."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _explain(error: msgspec.ValidationError, merged: Merged, tree: dict[str, Any]) -> str:
    text = str(error)
    match = re.search(r" - at `\$\.?(.*)`$", text)
    where = match[1] if match else ""
    setting = re.split(r"[\[]", where)[0]
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        return f"{merged.label(setting)}: {where}.{missing[1]} is missing"
    key = keys().get(re.sub(r"\[\d+\]", "", where)) or settable().get(setting)
    where = re.sub(r"(\[\d+\])(?:\[\d+\])+$", r"\1", where)
    allowed = key.allowed if key else text
    if where.endswith("]"):
        allowed = allowed.removeprefix("a list, each ").partition(", at least")[0]
    return f"{merged.label(setting)}: {where} must be {allowed}, not {shown(_value(tree, where))}"


def _value(tree: Any, where: str) -> Any:
    """The value at a path such as `rewards[0].types[1]`; the innermost existing value if a part is missing."""
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", where):
        try:
            tree = tree[int(index)] if index else tree[name]
        except (KeyError, IndexError, TypeError):
            break
    return tree


MASK = "********"


def load_profile(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Profile:
    """Load a profile, with `overrides` (by key path, such as `learner.batch_size`) as its highest layer.

    name_or_path: the name of a shipped profile, or the path of a .toml file. A file with `extends = "name"` is a layer
    on top of another profile. `{profile}` in run_dir becomes the file's stem. If the settings of a higher layer leave
    a setting of a lower layer without effect, the lower setting returns to its default: `--async false` works on top
    of any profile. Raises ProfileError with a message of one line.
    """
    path = profile_path(name_or_path)
    layers: list[Layer] = file_layers(path)
    if overrides:
        layers.append(override_layer(overrides))
    merged = merge(layers)
    profile = decode(merged)
    while (complaint := first_complaint(profile)) is not None:
        cause = max((merged.rank(other) for other in complaint.decided_by), default=-1)
        if merged.rank(complaint.key) >= cause:
            raise ProfileError(f"{merged.label(complaint.key)}: {complaint.text}")
        merged = merged.without(complaint.key, cause)
        profile = decode(merged)
    return msgspec.structs.replace(profile, run_dir=profile.run_dir.replace("{profile}", path.stem))


def resolved_toml(profile: Profile, *, mask_secrets: bool = False) -> str:
    """The resolved profile as TOML; loading it gives an equal profile. mask_secrets: hide the API key."""
    tree = _without_none(msgspec.to_builtins(profile))
    if mask_secrets and profile.server.api_key:
        tree["server"]["api_key"] = MASK
    return tomli_w.dumps(tree)


def write_profile(profile: Profile, path: Path) -> None:
    """Write the resolved profile atomically. Only its owner can read it if it contains an API key."""
    scratch = path.with_name(f".{path.name}{UNFINISHED}{os.getpid()}")
    mode = 0o600 if profile.server.api_key else 0o644
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
    """Remove None values: TOML has no null, and every None of a profile is a default."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
