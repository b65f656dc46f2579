"""Why a group is refused, on one short line that may be shown anywhere."""

from __future__ import annotations

LONGEST = 80


class Refused(Exception):
    """A group that is not learnt from; the message names field and index."""


def shown(text: str) -> str:
    """At most `LONGEST` characters of foreign text, each of them visible."""
    cut = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return "".join(character if character.isprintable() else "·" for character in cut)
