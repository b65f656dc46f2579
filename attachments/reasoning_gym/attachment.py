"""What Reasoning Gym adds to runs: problems that it generates, and the checks of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attachments.reasoning_gym.sections import GYM, TABLES, gym_names
from protocols.errors import did_you_mean, visible
from training_run.profile.generators import Generator
from training_run.profile.rules import Complaint, Rule
from training_run.profile.schema import Profile

NO_EFFECT = (
    Rule(
        "data.reasoning_gym",
        lambda v, _: not any(v[key].startswith(GYM) for key in ("data.train", "data.heldout")),
        "neither data.train nor data.heldout is reasoning_gym:NAME",
        "data.train data.heldout",
    ),
)

GENERATORS: Mapping[str, Generator] = {
    GYM: Generator(
        open="attachments.reasoning_gym.reasoning_gym:opened",
        weights="attachments.reasoning_gym.reasoning_gym:epoch_weights",
        rewards=({"name": "reasoning_gym", "correct": True},),
    )
}


def complaints(profile: Profile) -> Iterable[Complaint]:
    """Each table has a name of its own, which `data.train` or `data.heldout` contains."""
    data, tables, key = profile.data, TABLES.of(profile.data), TABLES.path
    named = {name for path in (data.train, data.heldout) if path.startswith(GYM) for name in gym_names(path)}
    for number, table in enumerate(tables):
        if table.label in [other.label for other in tables[:number]]:
            text = f"{key} has two tables with the name {table.label!r}: set name in one of them"
            yield Complaint(key, text)
        if table.label not in named:
            hint = did_you_mean(table.label, named) or ""
            where = f"{key}[{number}].{'name' if table.name else 'dataset'}"
            text = f"{where} {visible(table.label, 60)!r} is not named in data.train or data.heldout{hint}"
            yield Complaint(key, text)
