"""Profiles that differ from a valid one, and the fault of each."""

from __future__ import annotations

from typing import Any

from attachments.atropos.group_sizes import require_fillable
from protocols.errors import ProfileError
from training_run.profile.load import Layer, decode, flatten, merge
from training_run.profile.rules import first_complaint
from training_run.profile.schema import Profile
from training_run.supervision.custom_actors import require_positions

BASE: dict[str, Any] = {
    "model": {"path": "base"},
    "data": {"train": "train.jsonl"},
    "rewards": [{"name": "exact", "correct": True}],
}


TAP = {"name": "mine", "factory": "a:B", "mode": "tap", "at": "scored"}


def decoded(**sections: Any) -> Profile:
    """A profile from its tables."""
    tables = {**BASE, **sections, "data": {**BASE["data"], **sections.get("data", {})}}
    return decode(merge([Layer(label="profile", values=flatten(tables, "profile"))]))


def fault(**sections: Any) -> str | None:
    """The key that the schema, the first broken rule or a later check refuses; None if the profile is valid."""
    try:
        profile = decoded(**sections)
        if (complaint := first_complaint(profile)) is None:
            require_fillable(profile)
            require_positions(profile)
    except ProfileError as error:  # a key that the chosen type does not have, or a required key that is missing
        return str(error).removeprefix("profile: ").split()[0].removesuffix(":")
    if complaint is None:
        return None
    key = complaint.key.removesuffix(".type")
    assert complaint.text.startswith((key, key.partition(".")[0]))
    assert "\n" not in complaint.text
    return key
