"""No option may be given in vain: settings that need others, and what becomes of them without."""

from __future__ import annotations

from collections.abc import Iterator

from clotho.config.dependencies_atropos import ATROPOS_DEPENDENCES
from clotho.config.dependencies_run import RUN_DEPENDENCES
from clotho.config.dependencies_training import LEARNER_DEPENDENCES, OBJECTIVE_DEPENDENCES
from clotho.config.dependency import Complaint, Dependence
from clotho.config.keys import settable
from clotho.config.layers import Merged
from clotho.config.schema import Profile

DEPENDENCES: tuple[Dependence, ...] = (
    *ATROPOS_DEPENDENCES,
    *RUN_DEPENDENCES,
    *OBJECTIVE_DEPENDENCES,
    *LEARNER_DEPENDENCES,
)
"""In the order in which keys give up: what decides about another stands before it."""


def resting(profile: Profile, merged: Merged) -> dict[str, int]:
    """Keys that fall back to their defaults next, and the layer that made them; empty once all have.

    That is the first rule under which a lower layer's setting lost its effect to a higher layer's, or any that a recipe
    brought along. What has fallen back counts as decided by the layer that made it, so that what depends on it follows.
    """
    for rule in DEPENDENCES:
        if rule.works(profile):
            continue
        cause = max(merged.rank(switch) for switch in rule.switches)
        asleep = {
            path: max(cause, merged.origin[path])
            for path in rule.keys
            if path in merged.origin and (merged.from_recipe(path) or merged.origin[path] < cause)
        }
        if asleep:
            return asleep
    return {}


def without_effect(profile: Profile) -> Iterator[Complaint]:
    """No setting differs from its default in vain."""
    for rule in DEPENDENCES:
        if rule.works(profile):
            continue
        for path in rule.keys:
            if value_of(profile, path) != settable()[path].default:
                yield path, f"{path} {rule.fault}: {rule.because}"


def value_of(profile: Profile, path: str) -> object:
    """The value at a key path outside arrays of tables."""
    section, _, name = path.rpartition(".")
    return getattr(getattr(profile, section) if section else profile, name)
