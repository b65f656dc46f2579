"""Foreign text on a terminal: one line, nothing that moves the cursor, nothing that was not meant to be seen."""

from __future__ import annotations

import unicodedata

BREAKS = str.maketrans({"\n": "⏎", "\r": "", "\t": " "})
HARMLESS = frozenset({"\u200d"})
"""The joiner inside emoji."""


def visible(text: str, limit: int, *, ascii_only: bool = False) -> str:
    """At most `limit` characters of a text, on one line; what is left out is marked with an ellipsis.

    Control characters, escape sequences, changes of writing direction and half characters become `·`.
    ascii_only: for terminals that know no other characters.
    """
    shown = "".join(_harmless(character) for character in text[: limit + 1].translate(BREAKS))
    if len(text) > limit:
        shown = shown[: max(0, limit - 1)] + "…"
    if ascii_only:
        shown = shown.replace("⏎", "|").replace("…", "~").replace("·", ".")
        shown = shown.encode("ascii", "replace").decode("ascii")
    return shown


def _harmless(character: str) -> str:
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and character not in HARMLESS:
        return "·"
    return character
