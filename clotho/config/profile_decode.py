"""Settings into structs, with errors that name the file, the key, what is allowed and what was found."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from clotho.config.keys import REQUIRED, keys, settable
from clotho.config.layers import Merged
from clotho.config.schema import Profile
from protocols.errors import ProfileError


def decode(merged: Merged) -> Profile:
    """Build the profile. Raises ProfileError for what is missing, of another type, or out of range."""
    for path, key in settable().items():
        if key.default is REQUIRED and path not in merged.values:
            what = f"[[{path}]]" if key.item == "tables" else path
            raise ProfileError(f"{merged.label(path)}: {what} is missing: {key.help}")
    for path, value in merged.values.items():
        if not finite(value):
            raise ProfileError(f"{merged.label(path)}: {path} must be finite, not {shown(value)}")
    try:
        return msgspec.convert(merged.tree(), Profile)
    except msgspec.ValidationError as error:
        raise ProfileError(_explain(error, merged)) from error


def shown(value: object) -> str:
    """A value as a message shows it: as TOML would, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def finite(value: object) -> bool:
    """Whether every float in a value is an ordinary number; TOML knows `inf` and `nan`."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _explain(error: msgspec.ValidationError, merged: Merged) -> str:
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
    return f"{merged.label(setting)}: {where} must be {allowed}, not {shown(_value(merged.tree(), where))}"


def _value(tree: Any, where: str) -> Any:
    """The value at a path such as `rewards[0].types[1]`; the value as far as the path can be followed."""
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", where):
        try:
            tree = tree[int(index)] if index else tree[name]
        except (KeyError, IndexError, TypeError):
            break
    return tree
