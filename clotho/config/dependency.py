"""What it means that a setting makes sense only beside certain others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from clotho.config.keys import sections
from clotho.config.schema import Profile

Complaint = tuple[str, str]
"""The key at fault, and the sentence that says why and what to do."""


class Dependence(Struct, frozen=True, kw_only=True):
    """`keys` make sense only while `works` holds, which `switches` decide; `because` says to a person why not."""

    keys: tuple[str, ...]
    switches: tuple[str, ...]
    works: Callable[[Profile], bool]
    because: str
    fault: str = "has no effect"


def section_keys(name: str, *besides: str) -> tuple[str, ...]:
    """Every key of a section but some."""
    found = next(section for section in sections() if section.name == name)
    return tuple(key.path for key in found.keys if key.name not in besides)


def learner(*names: str) -> tuple[str, ...]:
    """Key paths in `[learner]`."""
    return tuple(f"learner.{name}" for name in names)


def own_stage(profile: Profile) -> bool:
    """Whether groups pass through an actor of the user's own, which may bring what no box does."""
    return any(actor.stands_on_the_flow for actor in profile.actors)


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
