"""Foreign text on a terminal: one line, nothing that moves the cursor, nothing that was not meant to be seen.

Numbers as people read them.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

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


def duration(seconds: float | None) -> str:
    """`0:07`, `12:30`, `1:02:03`; `-` where unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """A count with its thousands folded: `950`, `1.2M`, `14.8B`."""
    for unit in ("", "k", "M"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}B"


def memory(count: float) -> str:
    """Bytes in binary units: `3.1 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} GiB"


def number(value: float | None, form: str = ".3f") -> str:
    """A number in a form; `-` where there is none."""
    return "-" if value is None else format(value, form)


def milliseconds(seconds: float | None) -> str:
    """`0.412 ms`."""
    return "-" if seconds is None else f"{seconds * 1000:.3g} ms"


def percent(share: float) -> str:
    """`43.4 %`."""
    return f"{share * 100:.1f} %"


def shown_path(path: str | Path) -> str:
    """A path as one would type it here: relative where it lies below the current directory. Hub names stay."""
    absolute = Path(path)
    if absolute.is_absolute() and absolute.is_relative_to(Path.cwd()):
        return str(absolute.relative_to(Path.cwd()))
    return str(path)
